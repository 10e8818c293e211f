"""speculators' DFlash on the batches of a job, its own model, loss, anchors and defaults.

Rows are documents of one length; they are computed one by one and their gradients averaged. The
mask is the row of the target's embedding that the job names.
"""

import importlib.metadata
import warnings

import speculators.models.dflash.core as core
import torch
from peer_training import finish, load_target, read_job, train
from speculators.losses import resolve_loss_config
from speculators.models.dflash import DFlashDraftModel
from transformers import Qwen3Config

job, data = read_job()
ids_NBS, kept_K, shape = data["ids_NBS"].long(), data["kept_K"], job["shape"]
target = load_target(job["target"]).eval()
config, L = target.config, shape["layers"]
layers = Qwen3Config(
    vocab_size=config.vocab_size, hidden_size=config.hidden_size, num_hidden_layers=L,
    intermediate_size=config.intermediate_size, num_attention_heads=config.num_attention_heads,
    num_key_value_heads=config.num_key_value_heads, head_dim=config.head_dim,
    rms_norm_eps=config.rms_norm_eps, rope_theta=shape["rope_theta"], attention_bias=False,
    max_position_embeddings=config.max_position_embeddings, layer_types=["full_attention"] * L,
)  # fmt: skip
t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
t2d[kept_K] = True
warnings.simplefilter("ignore")
head = DFlashDraftModel.from_training_args(
    layers, t2d, kept_K - torch.arange(len(kept_K)), draft_vocab_size=len(kept_K),
    block_size=shape["num_heads"] + 1, mask_token_id=shape["mask_id"],
    verifier_name_or_path=job["target"], target_layer_ids=list(shape["taps"]),
    draft_attn_impl="sdpa",
)  # fmt: skip
head.float().train()
weighed = {"gamma": 4.0}
if job["d_pace"] is not None:
    weighed |= {"per_position_loss_weight": "dpace", "dpace_alpha": job["d_pace"]}
how = resolve_loss_config("kl_div" if job["d_pace"] is None else "ce", "eager")
kept, chosen, select = [], [], core.select_anchors
target.model.norm.register_forward_pre_hook(lambda module, given: kept.append(given[0]))


def select_and_keep(*given):
    chosen[:] = select(*given)
    return tuple(chosen)


core.select_anchors = select_and_keep


def states_of(ids_BS):
    with torch.no_grad():
        out = target.model(ids_BS, output_hidden_states=True)
    return torch.cat([out.hidden_states[tap] for tap in shape["taps"]], dim=-1), kept.pop()


def forward(features_BSX, ids_BS, last_BSD, row):
    length = ids_BS.shape[1]
    return head(
        hidden_states=features_BSX[row : row + 1], input_ids=ids_BS[row : row + 1],
        loss_mask=torch.ones(1, length), verifier_last_hidden_states=last_BSD[row : row + 1],
        document_ids=torch.zeros(1, length, dtype=torch.long), loss_config=how,
        max_anchors=shape["anchors"], **weighed,
    )  # fmt: skip


def loss_of(ids_BS):
    features_BSX, last_BSD = states_of(ids_BS)
    total, count = 0.0, len(ids_BS)
    for row in range(count):
        _, loss, _ = forward(features_BSX, ids_BS, last_BSD, row)
        (loss / count).backward()
        total += loss.detach() / count
    return total


seconds = train(head.named_parameters(), loss_of, job, ids_NBS)
head.eval()
left_out = ("embed_tokens", "verifier", "lm_head", "d2t", "t2d", "rotary")
tensors = {n: t for n, t in head.state_dict().items() if not n.startswith(left_out)}
about = {"seconds": seconds, "version": importlib.metadata.version("speculators"),
         "torch": torch.__version__}  # fmt: skip
found = []
head.lm_head.register_forward_hook(lambda module, given, out: found.append(out))
with torch.no_grad():  # logits of a row, for the proof that our runtime computes the same
    features_BSX, last_BSD = states_of(ids_NBS[0][:1])
    forward(features_BSX, ids_NBS[0][:1], last_BSD, 0)
tensors |= {"proof.logits": found[0], "proof.ids": ids_NBS[0][:1], "proof.anchors": chosen[0][None]}
finish(tensors, about, job)
