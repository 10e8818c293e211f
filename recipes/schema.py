"""The recipe: one frozen tree of everything that decides a run. Every default lives here.

`drafter.options` is checked against the family's own dataclass when the drafter is built, because
this room may not import the families (nor torch).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import UnionType
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import ConfigDict, Field, PrivateAttr, field_validator, model_validator

from specctl.core.storage.files import digest_of
from specctl.recipes.low_rank import JointPart, LoraPart
from specctl.recipes.section import Fraction, NameOf, Positive, Section, SeedNumber, Tokens, flatten
from specctl.recipes.serve import ServePart

LARGEST_OPTION = 10**12  # of a drafter's options; what fits each is the family's to say

SourceName = Annotated[str, Field(min_length=1)]
StageName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")]
DtypeName = Literal["auto", "float32", "bfloat16", "float16", "int8", "int4", "gguf"]
InflateName = Literal["100m", "300m", "1b", "8b"]


class TargetPart(Section):
    """The model to be made faster."""

    name: str = Field(
        default="tiny", min_length=1, description="alias, hub id or folder of the target"
    )
    revision: str | None = Field(default=None, description="commit of the hub repository")
    dtype: DtypeName = Field(default="auto", description="arithmetic of the target")
    inflate: InflateName | None = Field(
        default=None, description="grow the target to the cost of this many parameters, e.g. 300m"
    )
    adapters: tuple[str, ...] = Field(
        default=(),
        description="LoRA adapters of peft, added to the weights in this order: FOLDER or "
        "FOLDER@WEIGHT",
    )
    device_map: str | None = Field(
        default=None,
        min_length=1,
        description="layers over devices, host memory and disk: auto, balanced, cpu-offload, or a "
        "map as JSON or in a .json file; null = one device",
    )
    tensor_parallel: bool = Field(
        default=False,
        description="every matrix over the processes of torchrun, which read all rows together",
    )


class DrafterPart(Section):
    """Which method drafts, and its own options."""

    family: str = Field(default="small-lm", min_length=1, description="a module of drafters/")
    options: dict[str, Any] = Field(
        default_factory=dict, description="fields of the family's options"
    )
    init: str | None = Field(
        default=None,
        min_length=1,
        description="weights to start from: null = fresh, 'target' = cut from the target itself "
        "(family mtp: the module that it carries), else a package, a run folder or a Hugging "
        "Face folder",
    )

    @model_validator(mode="after")
    def _real_numbers(self) -> Self:
        for name, value in flatten({"options": self.options}).items():
            for number in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(number, (int, float)) and not abs(number) <= LARGEST_OPTION:
                    raise ValueError(
                        f"{name} has a number that no drafter can have; correct drafter.{name}"
                    )
        return self


class DataPart(Section):
    """Where prompts come from and how the target answers them."""

    source: SourceName | tuple[SourceName, ...] = Field(
        default="corpus",
        description="'corpus', 'self' (questions that the target writes itself), a path, or a hub "
        "data set; or a list of them, which are all read",
    )
    format: Literal["auto", "text", "jsonl", "csv", "parquet", "hub"] = "auto"
    split: str = Field(
        default="train",
        description="which split of a folder or data set is read; all = every one (files without "
        "splits are read whole)",
    )
    prompts: Positive = Field(default=1200, description="how many prompts the target answers")
    prompt_tokens: Positive = Field(default=48, description="tokens of a prompt cut from text")
    new_tokens: Positive = Field(default=128, description="tokens of each answer")
    regenerate: bool = Field(default=True, description="let the target write the answers")
    temperature: Annotated[float, Field(ge=0.0, le=5.0)] = 0.8
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = Field(
        default=None, description="of sampled answers: mass of the best tokens drawn from"
    )
    top_k: Positive | None = Field(
        default=None, description="of sampled answers: how many best tokens are drawn from"
    )
    greedy_share: Fraction = Field(default=0.5, description="share of answers written greedily")
    thinking: bool | None = Field(
        default=None,
        description="switch of the target's chat template (enable_thinking); null leaves it alone",
    )
    endpoint: str | None = Field(
        default=None,
        min_length=1,
        description="OpenAI-compatible servers of the target that write the answers: URL[,URL]",
    )
    endpoint_model: str | None = Field(
        default=None, description="the target's name at the endpoint; null asks the server"
    )
    endpoint_requests: Positive = Field(
        default=64, description="requests in flight at each URL of the endpoint"
    )
    train_on_prompt: bool = Field(default=False, description="also learn to predict the prompts")
    text_tokens: Annotated[int, Field(ge=0, le=10**13)] = Field(
        default=0, description="also learn from so many tokens of the source's own text"
    )
    limit_tokens: Tokens | None = Field(
        default=None, description="stop reading after so many tokens"
    )
    drop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(), description="strings left out of every text, e.g. image placeholders"
    )
    images: Literal["read", "drop"] = Field(
        default="read", description="of records: shown to the target, or left out of their texts"
    )
    map: dict[str, str] = Field(
        default={},
        description="fields of records that go by another name: {theirs: ours}, e.g. {passage: "
        "context}; of messages {messages.theirs: ours}",
    )
    ignore: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(), description="fields of records that are left out although they hold text"
    )
    max_left_out: Fraction = Field(
        default=0.2, description="largest share of records that may be left out of the data"
    )
    date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")] | None = Field(
        default=None,
        description="day (YYYY-MM-DD) that a chat template writes; null: the day of the first run",
    )
    on_policy: Fraction = Field(
        default=0.0, description="share of each batch's rows that the drafter itself writes"
    )
    on_policy_every: Positive = Field(
        default=50, description="steps after which the drafter writes anew"
    )
    target_source: Literal["inprocess", "endpoint", "files"] = Field(
        default="inprocess",
        description="where the target's states come from: the target here, servers, or files; with "
        "the last two its layers are never loaded",
    )
    states: str | None = Field(
        default=None,
        min_length=1,
        description="target_source endpoint: URL[,URL] of servers that write hidden states; files: "
        "the folder of such files",
    )
    kept_features: str | None = Field(
        default=None,
        min_length=1,
        description="folder of the hidden states that specctl serve has kept (traffic.features); "
        "the target reads the texts that it holds none of",
    )
    features: Literal["online", "offline"] = Field(
        default="online",
        description="offline: the target reads the rows once, its features are kept on disk",
    )
    feature_dtype: Literal["fp32", "bf16", "fp8"] = Field(
        default="bf16", description="precision of features on disk (features offline)"
    )
    teacher_topk: Positive | None = Field(
        default=None, description="target logits kept per token on disk; null keeps all"
    )
    features_gb: Annotated[float, Field(gt=0.0)] | None = Field(
        default=None,
        description="most gigabytes of features on disk; the rest stays online (of a URL: of the "
        "cache; the rest is fetched again)",
    )
    features_at: str | None = Field(
        default=None,
        min_length=1,
        description="where features are kept: a folder, or a URL of a store that fsspec knows "
        "(s3://, gs://, hf://); null: OUT/features",
    )
    seed: SeedNumber = 0

    @field_validator("source", mode="after")
    @classmethod
    def _one_is_no_list(cls, given: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not given:
            raise ValueError("a list of sources names at least one")
        return given[0] if len(given) == 1 and not isinstance(given, str) else given

    @model_validator(mode="after")
    def _no_ignored_endpoint(self) -> Self:
        if self.endpoint is None and self.endpoint_model is not None:
            raise ValueError("endpoint_model is ignored without endpoint; remove it")
        if self.endpoint is not None and not self.regenerate:
            raise ValueError("endpoint is ignored with regenerate false; remove it")
        return self

    @model_validator(mode="after")
    def _states_are_somewhere(self) -> Self:
        source = self.target_source
        if (self.states is None) != (source == "inprocess"):
            raise ValueError("states goes with target_source endpoint or files, and they with it")
        if source == "inprocess":
            return self
        if self.regenerate and self.endpoint is None:
            raise ValueError(
                f"with target_source {source} no target is here to write the answers; set endpoint "
                "to a server, or regenerate to false"
            )
        if self.on_policy > 0:
            raise ValueError("text that the drafter writes is scored by a target in this process")
        return self

    @property
    def reads_kept(self) -> bool:
        """Whether the hidden states that a server kept can take the place of the target's."""
        is_here = self.features == "online" and self.target_source == "inprocess"
        return is_here and self.on_policy == 0

    @model_validator(mode="after")
    def _kept_features_are_read(self) -> Self:
        if self.kept_features is not None and not self.reads_kept:
            raise ValueError(
                "kept_features goes with features online and target_source inprocess, and with "
                "text that the drafter does not write (on_policy 0)"
            )
        return self

    @model_validator(mode="after")
    def _no_ignored_features(self) -> Self:
        if self.features == "online":
            for key in ("teacher_topk", "features_gb", "features_at"):
                if getattr(self, key) is not None:
                    raise ValueError(f"{key} is ignored with features online; remove it")
        elif self.on_policy > 0:
            raise ValueError("text that the drafter writes has no features on disk; use online")
        return self


class TrainPart(Section):
    """How the drafter is trained."""

    steps: Positive = 600
    rows: Positive = Field(default=16, description="rows of a batch, over all processes")
    seq_len: Annotated[int, Field(ge=8)] = 256
    accumulate: Positive = Field(default=1, description="batches per optimizer step")
    learning_rate: Annotated[float, Field(gt=0.0, le=1.0)] = 2e-3
    schedule: Literal["wsd", "cosine", "linear"] = "wsd"
    warmup: Fraction = Field(default=0.05, description="share of the steps spent warming up")
    decay: Fraction = Field(default=0.3, description="share of the steps spent cooling down (wsd)")
    optimizer: Literal["muon", "adamw"] = "muon"
    vocab_rate: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        default=1.0,
        description="share of the rate at which embedding and LM head learn; below 1 for a draft "
        "that starts with the target's",
    )
    attention_rate: Annotated[float, Field(gt=0.0, le=16.0)] = Field(
        default=1.0,
        description="multiple of the rate at which matrices of attention learn",
    )
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        default=0.95, description="of muon: the share of a direction that is kept for the next step"
    )
    weight_decay: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    clip: Annotated[float, Field(gt=0.0)] = 1.0
    precision: Literal["no", "bf16"] = "no"
    parallel: Literal["ddp", "fsdp"] = Field(
        default="ddp", description="several processes: whole copies, or sharded weights and state"
    )
    shard_target: bool = Field(
        default=False, description="with fsdp: spread the frozen target over the processes, too"
    )
    compile: bool = Field(
        default=False, description="torch.compile what surrounds attention in the drafter's layers"
    )
    overlap: bool = Field(
        default=False, description="the target reads the next batch while the drafter learns"
    )
    sequence_parallel: Positive = Field(
        default=1, description="so many processes compute one row together, a stretch each"
    )
    select: Literal["none", "highest", "lowest", "random"] = Field(
        default="none",
        description="learn only some tokens of a batch: those on which the drafter is furthest "
        "behind a reference (highest: AdaSPEC), least far, or any",
    )
    select_share: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        default=0.4, description="share of the tokens that select keeps"
    )
    reference: str | None = Field(
        default=None,
        description="drafter that select compares with; null trains one first, in OUT/reference",
    )
    reference_steps: Positive | None = Field(
        default=None, description="steps of that training; null takes as many as the run itself"
    )
    lora: LoraPart | None = Field(
        default=None, description="adapt the weights of drafter.init by low-rank additions"
    )
    joint: JointPart | None = Field(
        default=None, description="change the target, too: OUT/target is then another model"
    )
    seed: SeedNumber = 0
    save_every: Positive = 200
    keep: Annotated[int, Field(ge=2, le=10**9)] = Field(
        default=2, description="checkpoints kept beside the best"
    )
    log_every: Positive = 10
    tau_every: Positive = Field(default=200, description="steps between measurements of tau")
    tau_prompts: Positive = 12
    tau_tokens: Positive = 48
    tau_suite: str | None = Field(
        default=None,
        min_length=1,
        description="public suite that tau is also measured on, as bench --suite names it; about "
        "tau_prompts questions, of every category alike",
    )
    nan_patience: Positive = Field(
        default=3, description="bad steps in a row before training stops"
    )
    trackers: tuple[str, ...] = Field(
        default=(), description="trackers of Accelerate, e.g. tensorboard"
    )

    def groups(self, processes: int) -> int:
        """Processes, or groups that compute a row together, which divide the rows of a batch."""
        return max(1, processes // self.sequence_parallel)

    @model_validator(mode="after")
    def _shares_fit(self) -> Self:
        if self.schedule == "wsd" and self.warmup + self.decay > 1.0:
            raise ValueError("warmup + decay must not exceed 1 with schedule wsd")
        compares = self.select in ("highest", "lowest")
        for key in ("reference", "reference_steps"):
            if getattr(self, key) is not None and not compares:
                raise ValueError(f"{key} is ignored with select {self.select}; remove it")
        if self.reference is not None and self.reference_steps is not None:
            raise ValueError("reference_steps is ignored beside a reference; remove one of them")
        if self.lora is not None and self.parallel == "fsdp":
            raise ValueError("lora adapts whole weights, which fsdp spreads; set parallel: ddp")
        if self.shard_target and self.parallel != "fsdp":
            raise ValueError("shard_target is ignored with parallel ddp; set parallel: fsdp")
        if self.overlap and (self.shard_target or self.joint is not None):
            raise ValueError("overlap needs a whole target that never changes; set overlap: false")
        if self.compile and self.parallel == "fsdp":
            raise ValueError("compile is for whole weights; set parallel: ddp, or compile: false")
        if self.sequence_parallel > 1 and (self.select != "none" or self.joint is not None):
            raise ValueError("select and joint look at whole rows; set sequence_parallel: 1")
        return self


class VocabPart(Section):
    """Trimming of the drafter's vocabulary."""

    size: Annotated[int, Field(ge=2, le=10**9)] | Literal["auto"] | None = Field(
        default=None, description="tokens kept; null keeps all"
    )
    min_coverage: Fraction = Field(
        default=0.95, description="least share of tokens covered (size auto)"
    )
    selector: str = Field(
        default="vocab-trim",
        min_length=1,
        description="what is counted: a module of train/selectors, e.g. vocab-trim or fr-spec",
    )
    search: Literal["exhaustive", "tpe"] = Field(
        default="exhaustive",
        description="size auto: every size, or sizes, draft lengths and domain weights together",
    )
    trials: Positive = Field(default=60, description="choices that search tpe looks at")


class StagePart(Section):
    """What one stage of a pipeline changes of the recipe. It starts from the weights of the stage
    before, unless its `drafter` says init; "stage:NAME" stands for the folder of another stage."""

    drafter: dict[str, Any] = Field(default_factory=dict)
    data: dict[str, Any] = Field(default_factory=dict)
    train: dict[str, Any] = Field(default_factory=dict)
    vocab: dict[str, Any] = Field(default_factory=dict)


class ScalingPart(Section):
    """The grid of `plan --scaling`: every size of small-lm with every number of steps."""

    sizes: tuple[tuple[Positive, Positive], ...] = Field(
        default=((1, 64), (1, 128), (2, 128), (2, 256)), description="layers and width of each"
    )
    steps: tuple[Positive, ...] = Field(default=(60, 120, 240), description="token budgets")
    batches: tuple[Positive, ...] = Field(
        default=(1, 2, 4, 8), description="batch sizes whose speed is measured; []: none"
    )


class ExportPart(Section):
    """Which formats are written after training."""

    formats: tuple[Annotated[str, NameOf("specctl.export.formats", "FORMAT")], ...] = ("specctl",)


def _with_parent(schema: dict[str, Any]) -> None:
    """A recipe file may say more than the recipe that is made of it."""
    about = "recipe, or path of one, whose fields hold wherever this file says nothing"
    kinds = [{"type": "string", "minLength": 1}, {"type": "null"}]
    schema["properties"]["based_on"] = {"anyOf": kinds, "default": None, "description": about}


class Recipe(Section):
    """Everything that decides a run. `origin` says where each value came from."""

    model_config = ConfigDict(json_schema_extra=_with_parent)

    name: str = "unnamed"
    summary: str = ""
    paper: str = ""
    target: TargetPart = TargetPart()
    drafter: DrafterPart = DrafterPart()
    data: DataPart = DataPart()
    train: TrainPart = TrainPart()
    serve: ServePart = ServePart()
    vocab: VocabPart = VocabPart()
    export: ExportPart = ExportPart()
    scaling: ScalingPart = ScalingPart()
    stages: dict[StageName, StagePart] = Field(
        default_factory=dict, description="a pipeline: by name, what each stage changes, in order"
    )

    _origin: dict[str, str] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _adapters_are_here(self) -> Self:
        is_elsewhere = self.data.endpoint is not None or self.data.target_source != "inprocess"
        if self.target.adapters and is_elsewhere:
            raise ValueError(
                "target.adapters are added in this process, which a server of the target does not "
                "see; merge them into one model (merge_and_unload of peft), serve that and name it"
            )
        return self

    @model_validator(mode="after")
    def _suite_is_decoded(self) -> Self:
        source = self.data.target_source
        if self.train.tau_suite is not None and source != "inprocess":
            raise ValueError(
                f"train.tau_suite is ignored with data.target_source {source}, where nothing is "
                "decoded; remove it"
            )
        return self

    @property
    def origin(self) -> dict[str, str]:
        """Dotted field -> "base", "recipe NAME", "--target" and the like, or "--set"."""
        return {key: self._origin.get(key, "base") for key in flatten(self.to_json())}

    @property
    def digest(self) -> str:
        """sha256 of the canonical JSON of all that decides the result (not the prose)."""
        fields = {k: v for k, v in self.to_json().items() if k not in ("summary", "paper")}
        fields["stages"] = list(fields["stages"].items())  # their order decides, too
        return digest_of(fields)

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    def with_origin(self, origin: Mapping[str, str]) -> Recipe:
        """The same recipe, knowing where its values came from."""
        copy = self.model_copy()
        copy._origin = dict(origin)
        return copy


def section_at(path: tuple[Any, ...]) -> type[Section] | None:
    """The section class that owns the last key of `path`; None inside free-form options."""
    owner: type[Section] = Recipe
    for key in path[:-1]:
        field = owner.model_fields.get(str(key))
        kind = field.annotation if field else None
        choices = get_args(kind) if isinstance(kind, UnionType) else (kind,)  # X | None
        found = [c for c in choices if isinstance(c, type) and issubclass(c, Section)]
        if not found:
            return None
        owner = found[0]
    return owner
