"""Names that other trainers and engines have for what a recipe sets, and keys in another section
than theirs: what an error about an unknown key says instead of the key that is spelled alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from specctl.core.errors import alike
from specctl.recipes.schema import DrafterPart, Recipe
from specctl.recipes.section import Section

OPTIONS = "drafter.options"  # of the family: what they are is checked where the family is known

# Field of a recipe -> names that it has elsewhere: transformers, Accelerate, peft, vLLM, SGLang,
# llama.cpp and the trainers of published drafters. A name stands once in each section.
NAMES: Mapping[str, str] = {
    "target.name": "model model_id model_name model_path model_name_or_path path repo target",
    "target.dtype": "torch_dtype precision quantization load_in_8bit load_in_4bit bits",
    "target.adapters": "adapter lora lora_path loras peft",
    "target.tensor_parallel": "tp tp_size tensor_parallel_size",
    "target.device_map": "device devices",
    "drafter.family": "type kind method name model algorithm",
    "drafter.init": "path checkpoint weights init_from pretrained",
    "data.source": "files file path paths dataset datasets dataset_name data_files train_file "
    "train_data filename folder name sources",
    "data.prompts": "max_samples num_samples samples num_prompts max_prompts limit",
    "data.new_tokens": "max_new_tokens max_tokens answer_tokens",
    "train.steps": "epochs num_epochs num_train_epochs max_steps num_steps iterations",
    "train.rows": "batch_size batch micro_batch per_device_train_batch_size train_batch_size",
    "train.seq_len": "max_length max_len max_seq_len max_seq_length block_size context_length",
    "train.accumulate": "grad_accum gradient_accumulation gradient_accumulation_steps",
    "train.learning_rate": "lr peak_lr max_lr",
    "train.schedule": "scheduler lr_scheduler lr_scheduler_type",
    "train.warmup": "warmup_steps warmup_ratio",
    "train.optimizer": "optim",
    "train.clip": "max_grad_norm grad_clip grad_norm",
    "train.precision": "bf16 fp16 dtype mixed_precision",
    "train.save_every": "save_steps save_interval",
    "train.log_every": "logging_steps log_steps log_interval",
    "train.tau_every": "eval_steps eval_every eval_interval",
    "train.keep": "save_total_limit",
    "train.trackers": "report_to wandb tensorboard logger",
    "train.lora": "peft",
    "train.lora.rank": "r lora_r",
    "train.lora.alpha": "lora_alpha",
    "train.lora.targets": "target_modules",
    "vocab.size": "draft_vocab_size vocab_size keep tokens",
    "serve.length": "num_speculative_tokens speculative_tokens speculative_num_steps num_steps "
    "num_draft_tokens draft_max draft_length max_draft gamma k depth tokens",
    "serve.nodes": "num_nodes tree_size total_token total_tokens speculative_num_draft_tokens",
    "serve.policy": "tree method strategy",
    "serve.stop": "stop_rule",
    "serve.rule": "verification verify acceptance_method",
    "export.formats": "format to",
}  # fmt: skip


def right_field(field: str) -> str | None:
    """The field that an unknown dotted key stands for: what its section calls otherwise, or what
    another section has; None where at most a key of its section is spelled alike."""
    section, _, key = field.rpartition(".")
    for right, names in NAMES.items():
        if right.rpartition(".")[0] == section and key in names.split():
            return right
    elsewhere = [name for name, part in _sections() if key in part.model_fields]
    if elsewhere:
        return f"{elsewhere[0]}.{key}"
    for right, names in NAMES.items():
        if key in names.split():
            return right
    is_option = section == "drafter" and not alike(key, DrafterPart.model_fields)
    return f"{OPTIONS}.{key}" if is_option else None


def _sections() -> Iterator[tuple[str, type[Section]]]:
    """The sections of a recipe."""
    for name, info in Recipe.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            yield name, info.annotation
