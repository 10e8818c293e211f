"""speculators' EAGLE-3 on the batches of a job, its own model, loss and defaults.

It packs documents into one row; rows here are documents of one length, so that they are computed
one by one and their gradients averaged, which is the same and takes less time on a CPU.
"""

import importlib.metadata
import warnings

import torch
from peer_training import finish, load_target, read_job, train
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel
from transformers import LlamaConfig

job, data = read_job()
ids_NBS, kept_K, shape = data["ids_NBS"].long(), data["kept_K"], job["shape"]
target = load_target(job["target"]).eval()
layer = LlamaConfig(**{**target.config.to_dict(), "num_hidden_layers": 1,
                       "intermediate_size": shape["intermediate"]})  # fmt: skip
t2d = torch.zeros(target.config.vocab_size, dtype=torch.bool)
t2d[kept_K] = True
warnings.simplefilter("ignore")
head = Eagle3DraftModel.from_training_args(
    layer, t2d, kept_K - torch.arange(len(kept_K)), draft_vocab_size=len(kept_K),
    norm_before_residual=True, norm_before_fc=True, norm_output=True,
    ttt_steps=shape["ttt_steps"], verifier_name_or_path=job["target"],
    target_layer_ids=list(shape["taps"]), draft_attn_impl="sdpa",
)  # fmt: skip
head.float().train()
how, kept = resolve_loss_config("kl_div", "eager"), []
target.model.norm.register_forward_pre_hook(lambda module, given: kept.append(given[0]))


def states_of(ids_BS):
    with torch.no_grad():
        out = target.model(ids_BS, output_hidden_states=True)
    features_BSX = torch.cat([out.hidden_states[tap] for tap in shape["taps"]], dim=-1)
    return features_BSX, kept.pop()


def loss_of(ids_BS):
    features_BSX, last_BSD = states_of(ids_BS)
    total, count = 0.0, len(ids_BS)
    for row in range(count):
        length = ids_BS.shape[1] - 1
        _, loss, _ = head(
            hidden_states=features_BSX[row : row + 1, :-1], input_ids=ids_BS[row : row + 1, 1:],
            document_ids=torch.zeros(1, length, dtype=torch.long),
            loss_mask=torch.ones(1, length), position_ids=torch.arange(1, length + 1)[None],
            verifier_last_hidden_states=last_BSD[row : row + 1, 1:],
            ttt_steps=shape["ttt_steps"], ttt_step_loss_decay=1.0, loss_config=how,
        )  # fmt: skip
        (loss / count).backward()
        total += loss.detach() / count
    return total


seconds = train(head.named_parameters(), loss_of, job, ids_NBS)
head.eval()
left_out = ("embed_tokens", "verifier", "d2t", "t2d", "rotary")
tensors = {n: t for n, t in head.state_dict().items() if not n.startswith(left_out)}
about = {"seconds": seconds, "version": importlib.metadata.version("speculators"),
         "torch": torch.__version__}  # fmt: skip
found = []
head.lm_head.register_forward_hook(lambda module, given, out: found.append(out))
with torch.no_grad():  # logits of a row, for the proof that our runtime computes the same
    features_BSX, _ = states_of(ids_NBS[0][:1])
    length = ids_NBS.shape[2] - 1
    head(hidden_states=features_BSX[:, :-1], input_ids=ids_NBS[0][:1, 1:], ttt_steps=1,
         document_ids=torch.zeros(1, length, dtype=torch.long),
         position_ids=torch.arange(1, length + 1)[None])  # fmt: skip
tensors["proof.logits"], tensors["proof.ids"] = found[0], ids_NBS[0][:1]
finish(tensors, about, job)
