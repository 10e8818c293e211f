"""nvidia-modelopt's EAGLE-3 on the batches of a job, its own loss and unrolling.

Its LM head starts at random; with `head` "target" as the target's rows, as ours.
"""

import importlib.metadata

import modelopt.torch.speculative as speculative
import torch
from peer_training import finish, load_target, read_job, train

job, data = read_job()
ids_NBS, kept_K, shape = data["ids_NBS"].long(), data["kept_K"], job["shape"]
model = load_target(job["target"])
config = model.config
speculative.convert(model, [("eagle", {
    "eagle_architecture_config": {
        "hidden_act": "silu", "torch_dtype": "float32", "num_hidden_layers": 1,
        "rope_scaling": {"rope_type": "default", "rope_theta": shape["rope_theta"]},
        "rope_theta": shape["rope_theta"], "intermediate_size": shape["intermediate"],
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads, "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps, "mlp_bias": False, "attention_bias": False,
        "attention_dropout": 0.0, "initializer_range": 0.02,
        "draft_vocab_size": len(kept_K), "has_lm_head": True,
        "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
        "use_aux_hidden_state": True, "use_mtp_layernorm": False,
        "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in shape["taps"]],
    },
    "eagle_ttt_steps": shape["ttt_steps"], "eagle_use_torch_compile": False,
})])  # fmt: skip
head = model.eagle_module
head.float()
head.d2t.copy_(kept_K - torch.arange(len(kept_K)))
if job["head"] == "target":
    head.lm_head.weight.data.copy_(model.get_output_embeddings().weight[kept_K])
model.train()


def loss_of(ids_BS):
    out = model(input_ids=ids_BS)
    out.loss.backward()
    return out.loss.detach()


seconds = train(head.named_parameters(), loss_of, job, ids_NBS)
model.eval()
tensors = {n: t for n, t in head.state_dict().items() if not n.startswith(("d2t", "rotary"))}
with torch.no_grad():  # logits of a row, for the proof that our runtime computes the same
    ids_BS = ids_NBS[0][:1]
    inputs = model._eagle_base_model_forward(ids_BS, None, None, None, True, None)[0]
    embedded, states, mask, position, *_ = model._prepare_eagle_inputs(
        ids_BS, None, None, None, inputs
    )
    head._maybe_init_rope(device=states.device)
    tensors["proof.logits"] = model._eagle_forward(states, embedded, mask, position)[2]
    tensors["proof.ids"] = ids_BS
about = {"seconds": seconds, "version": importlib.metadata.version("nvidia-modelopt"),
         "torch": torch.__version__}  # fmt: skip
finish(tensors, about, job)
