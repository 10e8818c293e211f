"""What an IR computes, by OpenVINO on the CPU in float32, for the check of an export.

ENV/bin/python read_openvino.py JOB ANSWERS

The job: {"folder": ..., "ids": [...], "known": n, "states": FILE or null, "block": FILE or null,
"logits": FILE}. Without
`states` [S, V] are the logits of a language model. With `states` [layers + 1, n, D] of a target it
is an EAGLE-3 draft, treated as OpenVINO GenAI does: the outputs of the layers that the IR names go
through `fc`, which is taken out of the graph; what `midlayer` adds last is fed back. Then [N, K]
are the logits behind id n - 1 and behind each later one.

With `block` [T, D], embedding rows, it is a DFlash draft: half of the states are read with one
block, the rest with the next, as two rounds of OpenVINO GenAI are. Then [T - 1, D], the normed
states of the second block's masks, stand for logits.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov

EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
DFLASH = ("mask_token_id", "target_layer_ids")


class Model:
    """A stateful IR; a call reads from its beginning."""

    def __init__(self, model: Any) -> None:
        self.request = ov.Core().compile_model(model, "CPU", EXACT).create_infer_request()
        self.names = {name for port in model.inputs for name in port.get_names()}

    def __call__(self, ids: list[int], **more: Any) -> dict[str, Any]:
        length = len(ids)
        fed = {
            "input_ids": np.array([ids], dtype=np.int64),
            "attention_mask": np.ones((1, length), dtype=np.int64),
            "position_ids": np.arange(length, dtype=np.int64)[None],
            **more,
        }
        self.request.reset_state()
        return self.infer(**fed)

    def infer(self, **fed: Any) -> dict[str, Any]:
        """What follows the states that are there."""
        fed["beam_idx"] = np.zeros(1, dtype=np.int32)
        out = self.request.infer({name: x for name, x in fed.items() if name in self.names})
        return {name: x for port, x in out.items() for name in port.get_names()}


def kind(node: Any) -> str:
    return str(node.get_type_name())


def without_fc(model: Any) -> Any:
    """Its weight [D, 3 D]; the states that the graph reads are now as wide as the draft."""
    for node in model.get_ordered_ops():
        if kind(node) != "MatMul":
            continue
        source = node.input_value(0).get_node()
        if kind(source) == "Parameter":
            weight = node.input_value(1).get_node()
            while kind(weight) == "Convert":
                weight = weight.input_value(0).get_node()
            source.set_partial_shape(ov.PartialShape([-1, -1, weight.shape[0]]))
            for reader in node.output(0).get_target_inputs():
                reader.replace_source_output(source.output(0))
            return weight.data.astype(np.float32)
    raise SystemExit("no fc behind the states")


def give_state(model: Any) -> None:
    """`last_hidden_state`: the addition in `midlayer` behind a gated product."""
    found = []
    for node in model.get_ordered_ops():
        if kind(node) == "Add" and "midlayer" in node.get_friendly_name():
            product = node.input_value(1).get_node()
            is_down = kind(product) == "MatMul"
            if is_down and kind(product.input_value(0).get_node()) == "Multiply":
                found.append(node)
    if len(found) != 1:
        raise SystemExit(f"{len(found)} states to feed back")
    result = ov.op.Result(found[0].output(0))
    result.output(0).set_names({"last_hidden_state"})
    model.add_results([result])
    model.validate_nodes_and_infer_types()


def chained(model: Any, job: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Logits [N, K], every state of the draft's own fed back beside the next token."""
    layers = [int(layer) for layer in str(model.get_rt_info(["hidden_layers_list"]).value).split()]
    states, ids, known = np.load(job["states"]), job["ids"], job["known"]
    taken = np.concatenate([states[layer + 1] for layer in sorted(layers)], -1)
    weight = without_fc(model)
    give_state(model)
    reader, fed, said = Model(model), (taken.astype(np.float32) @ weight.T)[None], []
    for end in range(known, len(ids) + 1):
        out = reader(ids[1:end], hidden_states=fed)
        said.append(out["logits"][0, -1])
        fed = np.concatenate([fed, out["last_hidden_state"][:, -1:]], 1)
    info = {"layers": layers, "eagle3": str(model.get_rt_info(["eagle3_mode"]).value)}
    return np.stack(said), {**info, "d2t": out["d2t"].tolist()}


def blockwise(model: Any, job: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Normed states [T - 1, D] after two rounds, which share a KV cache of committed states."""
    info = {name: str(model.get_rt_info(["dflash", name]).value) for name in DFLASH}
    layers = [int(layer) for layer in info["target_layer_ids"].split(",")]
    states, block = np.load(job["states"]), np.load(job["block"])[None]
    taken = np.concatenate([states[layer + 1] for layer in layers], -1)[None]
    reader, committed = Model(model), 0
    reader.request.reset_state()
    for end in (taken.shape[1] // 2, taken.shape[1]):
        length = end + block.shape[1]
        out = reader.infer(
            inputs_embeds=block,
            hidden_states=taken[:, committed:end],
            position_ids=np.arange(committed, length, dtype=np.int64)[None],
            attention_mask=np.ones((1, length), dtype=np.int64),
        )
        committed = end
    mode = str(model.get_rt_info(["dflash_mode"]).value)
    return out["last_hidden_state"][0], {**info, "layers": layers, "dflash": mode}


def main() -> None:
    job_file, answer_file = map(Path, sys.argv[1:])
    job = json.loads(job_file.read_text())
    model = ov.Core().read_model(Path(job["folder"]) / "openvino_model.xml")
    found: dict[str, Any] = {}
    if job["states"] is None:
        logits = Model(model)(job["ids"])["logits"][0]
    elif job["block"] is not None:
        logits, found = blockwise(model, job)
    else:
        logits, found = chained(model, job)
    np.save(job["logits"], logits.astype(np.float32))
    answer_file.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
