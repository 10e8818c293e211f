"""Hidden states from servers: vLLM's `extract_hidden_states` with its hidden-state connector.

Token ids are posted with `max_tokens` 1; the reply names a safetensors file of the prompt's states
(`kv_transfer_params.hidden_states_path`), on storage that both see, whose lock is held until it is
written. A file is removed once it was read. Busy, failing and several servers as for answers.
Letters: N tokens of a text, K layers, D hidden width.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.core.errors import FileError, IncompatibleError, NetworkError
from specctl.recipes.schema import DataPart
from specctl.runtime.measure.reporter import Reporter
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.served import ServedLM
from specctl.runtime.target.target import Target
from specctl.train.data.prompts.answers import AnswerJob
from specctl.train.data.written.endpoint import EndpointSettings, EndpointWriter, Server
from specctl.train.features.state_files import checked, read_ids

ONE = Sampling(temperature=0.0, max_new_tokens=1)
RANK = 8  # the engine's greedy token is among so many best ones of the states it handed out


class StateServers(EndpointWriter):
    """Servers that are asked for states. One writer: the process that trains."""

    def __init__(self, target: Target, part: DataPart, console: Reporter) -> None:
        assert part.states is not None, "the schema asks for it"
        where = EndpointSettings.of(part.states, part.endpoint_model, part.endpoint_requests)
        super().__init__(target, where, console)
        self.layers: tuple[int, ...] = ()
        self._found: dict[int, Tensor] = {}
        self._is_checked = False

    def states(self, texts: Sequence[tuple[int, ...]], layers: tuple[int, ...]) -> list[Tensor]:
        """[N, K, D] of every text."""
        self.layers, self._found = layers, {}
        jobs = iter([AnswerJob(i, 0, text, ONE) for i, text in enumerate(texts)])
        self.write(jobs, lambda job, ids, reason: None)
        return [self._found[i] for i in range(len(texts))]

    def _tell(self) -> None:
        """Every text counts: one that was left out ends the run."""
        if self._tally.left_out:
            raise NetworkError(
                "the endpoint gave no states of a text",
                where=", ".join(self.settings.urls),
                found=self._tally.left_out.most_common(1)[0][0],
                expected="states of every row, which take --max-model-len train.seq_len + 1",
                do="look into the server's log; the same command goes on from the last checkpoint",
            )

    def _greeted(self, reply: Mapping[str, Any]) -> None:
        named = (reply.get("kv_transfer_params") or {}).get("hidden_states_path")
        if isinstance(named, str):
            path = Path(named)
            _wait_for(path)
            _remove(path)

    def _read(
        self, job: AnswerJob, reply: Mapping[str, Any], server: Server
    ) -> tuple[list[int], str]:
        found = super()._read(job, reply, server)
        named = (reply.get("kv_transfer_params") or {}).get("hidden_states_path")
        if not isinstance(named, str):
            raise IncompatibleError(
                "the endpoint writes no hidden states",
                where=server.url,
                found="a reply without kv_transfer_params.hidden_states_path",
                expected="vLLM started for it",
                do="vllm serve TARGET " + launch_words(self.layers, "FOLDER"),
            )
        states = self._taken(Path(named), tuple(job.prompt_ids), server)
        if not self._is_checked:
            self._check_last(states, found[0][0], server)
        self._found[job.index] = states
        return found

    def _taken(self, path: Path, text: tuple[int, ...], server: Server) -> Tensor:
        """The states of a file, which is then removed."""
        _wait_for(path)
        if not path.exists():
            raise FileError(
                "the file of hidden states that the endpoint names is not here",
                where=server.url,
                found=str(path),
                expected="a folder that the server and this process both see",
                do="start the engine with a shared_storage_path on common storage",
            )
        if tuple(read_ids(path)[: len(text)]) != text:
            raise IncompatibleError(
                "the endpoint wrote the states of another text",
                where=str(path),
                found="other token_ids",
                expected="those that were posted",
                do="start the engine without other clients that write to that folder",
            )
        states = checked(path, len(text), self.layers).clone()
        _remove(path)
        return states

    def _check_last(self, states_NKD: Tensor, token: int, server: Server) -> None:
        """What the engine says next must follow from the last state that it handed out: layers in
        another order, of another model, or behind the norm would be noticed by nothing else."""
        self._is_checked = True
        lm = self.target.lm
        assert isinstance(lm, ServedLM)
        if self.layers[-1] != self.target.spec.num_layers:
            return
        head = self.target.borrowed()
        logits_V = F.linear(lm.normed(states_NKD[-1:, -1])[0], head.head_VD, head.head_bias_V)
        if int((logits_V > logits_V[token]).sum()) >= RANK or not torch.isfinite(logits_V).all():
            raise IncompatibleError(
                "the states of the endpoint do not lead to what it says",
                where=server.url,
                found=f"token {token} is not among the {RANK} likeliest behind its last state",
                expected=f"states of layers {list(self.layers)}, in order, the last one before "
                "the final norm",
                do="vllm serve TARGET " + launch_words(self.layers, "FOLDER"),
            )


def _lock(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _wait_for(path: Path) -> None:
    """Until the engine has written the file and let go of its lock."""
    with suppress(FileNotFoundError), _lock(path).open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_SH)


def _remove(path: Path) -> None:
    for file in (path, _lock(path)):
        file.unlink(missing_ok=True)


def launch_words(layers: Sequence[int], folder: str) -> str:
    """What `vllm serve TARGET` is given so that it writes the states of these layers."""
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {
            "hf_config": {"eagle_aux_hidden_state_layer_ids": [*layers]},
        },
    }
    transfer = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": folder},
    }
    return (
        f"--speculative-config '{json.dumps(speculative)}' "
        f"--kv-transfer-config '{json.dumps(transfer)}'"
    )
