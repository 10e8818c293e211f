"""What the trainers of peers share when they run beside ours: batches, optimizers, the loop.

No import of specctl: these files run in the environment of the trainer. The job is one JSON object
in argv[1]: `target` and `batches` (what to read), `out` (what to write), `seed`, `rates` (learning
rate of every step), `clip`, `weight_decay`, `momentum` and `attention_rate` (of Muon), `shape`
(sizes of the head).
Letters: B rows, K draft vocabulary, N batches, S sequence.
"""

import json
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from turns import turn


def read_job():
    job = json.loads(sys.argv[1])
    torch.manual_seed(job["seed"])
    return job, load_file(job["batches"])


def load_target(folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.requires_grad_(False)


def optimizers(named, job):
    """Muon on matrices that touch no vocabulary, AdamW on the rest, as ours; those of attention
    learn at a multiple of the rate."""
    trained = {name: p for name, p in named if p.requires_grad}
    hidden = {n: p for n, p in trained.items() if p.ndim == 2 and "lm_head" not in n}
    attention = [p for name, p in hidden.items() if "attn" in name]
    others = [p for name, p in hidden.items() if "attn" not in name]
    matrices = [{"params": others}, {"params": attention, "share": job["attention_rate"]}]
    rest = [p for name, p in trained.items() if p.ndim != 2 or "lm_head" in name]
    decay = job["weight_decay"]
    how = {"weight_decay": decay, "momentum": job["momentum"], "adjust_lr_fn": "match_rms_adamw"}
    found = [torch.optim.Muon(matrices, lr=1.0, **how)]
    if rest:
        found.append(torch.optim.AdamW(rest, lr=1.0, betas=(0.9, 0.95), weight_decay=decay))
    return found


def train(named, loss_of, job, ids_NBS):
    """`loss_of(ids_BS)` computes and backpropagates; seconds of every step, loss included."""
    named = list(named)
    found, seconds = optimizers(named, job), []
    trained = [p for _, p in named if p.requires_grad]
    for step, rate in enumerate(job["rates"]):
        with turn():
            began = time.perf_counter()
            loss = loss_of(ids_NBS[step])
            torch.nn.utils.clip_grad_norm_(trained, job["clip"])
            for optimizer in found:
                for group in optimizer.param_groups:
                    group["lr"] = rate * group.get("share", 1.0)
                optimizer.step()
            for parameter in trained:
                parameter.grad = None
            seconds.append(time.perf_counter() - began)
        print(json.dumps({"step": step + 1, "loss": float(loss), "seconds": seconds[-1]}),
              flush=True)  # fmt: skip
    return seconds


def finish(tensors, about, job):
    """The head, then the mark that it is whole."""
    out = Path(job["out"])
    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, out / "head.safetensors")
    (out / "about.json").write_text(json.dumps(about, indent=1) + "\n")
