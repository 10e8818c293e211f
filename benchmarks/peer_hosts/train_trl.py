"""A draft model cut from the target and trained by TRL, as one types it: GKDTrainer on the target's
text with the forward KL divergence, or SFTTrainer on the same text. Optimizer, schedule and
clipping are TRL's defaults; batches come in the order of the job.
"""

import importlib.metadata
import json
import time
from pathlib import Path

import torch
from datasets import Dataset
from peer_training import load_target, read_job
from torch.utils.data import SequentialSampler
from transformers import AutoTokenizer, LlamaForCausalLM, TrainerCallback
from trl import SFTConfig, SFTTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from turns import turn

job, data = read_job()
ids_NBS, out = data["ids_NBS"].long(), Path(job["out"])
target, kept = load_target(job["target"]).eval(), job["shape"]["from_layers"]
config = type(target.config)(**{**target.config.to_dict(), "num_hidden_layers": len(kept)})
model = LlamaForCausalLM(config)
weights = {n: t for n, t in target.state_dict().items() if ".layers." not in n}
for new, old in enumerate(kept):
    for name, tensor in target.model.layers[old].state_dict().items():
        weights[f"model.layers.{new}.{name}"] = tensor
model.load_state_dict(weights)
is_gkd, seconds = job["method"] == "gkd", []


class Clock(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        self.turn = turn()
        self.turn.__enter__()
        self.began = time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        seconds.append(time.perf_counter() - self.began)
        self.turn.__exit__(None, None, None)


def batch_of(rows):
    ids_BS = torch.tensor([row["input_ids"] for row in rows])
    whole_BS = torch.ones_like(ids_BS)
    return {"input_ids": ids_BS, "attention_mask": whole_BS, "labels": ids_BS,
            "prompts": ids_BS[:, :1], "prompt_attention_mask": whole_BS[:, :1]}  # fmt: skip


def plain_batch_of(rows):
    return {name: batch_of(rows)[name] for name in ("input_ids", "attention_mask", "labels")}


kind, settings = (GKDTrainer, GKDConfig) if is_gkd else (SFTTrainer, SFTConfig)
more = {"lmbda": 0.0, "beta": 0.0} if is_gkd else {}
args = settings(
    output_dir=str(out / "trl"), learning_rate=job["learning_rate"], max_steps=len(ids_NBS),
    per_device_train_batch_size=ids_NBS.shape[1], max_length=ids_NBS.shape[2], seed=job["seed"],
    report_to="none", save_strategy="no", logging_steps=10, use_cpu=True, bf16=False,
    gradient_checkpointing=False, **more,
)  # fmt: skip


class InOrder(kind):
    def _get_train_sampler(self, dataset=None):
        return SequentialSampler(dataset if dataset is not None else self.train_dataset)


trainer = InOrder(
    model, args=args, data_collator=batch_of if is_gkd else plain_batch_of,
    train_dataset=Dataset.from_dict({"input_ids": ids_NBS.flatten(0, 1).tolist()}),
    processing_class=AutoTokenizer.from_pretrained(job["target"]), callbacks=[Clock()],
    **({"teacher_model": target} if is_gkd else {}),
)  # fmt: skip
trainer.train()
model.eval().save_pretrained(out / "model")
AutoTokenizer.from_pretrained(job["target"]).save_pretrained(out / "model")
with torch.no_grad():  # logits of a row, for the proof that our runtime computes the same
    logits = model(ids_NBS[0][:1]).logits
torch.save({"ids": ids_NBS[0][:1], "logits": logits}, out / "proof.pt")
about = {"seconds": seconds, "version": importlib.metadata.version("trl"),
         "torch": torch.__version__}  # fmt: skip
(out / "about.json").write_text(json.dumps(about, indent=1) + "\n")
