"""What benchmarks/ablations.py compares: a line for each published idea, what it claims, and its
two arms. Figures of papers are those of their abstracts and tables, on their targets.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Trained:
    """`family` as it is beside one with other settings, beside another family, or, drafting in
    `shape`, beside itself in another shape."""

    system: str
    claim: str
    family: str
    without: tuple[str, ...] | str
    shape: str = "chain"  # or served
    whole: tuple[str, ...] = ()
    without_shape: str | None = None  # None: the same
    heat: str = "greedy"


@dataclass(frozen=True, slots=True)
class Served:
    """A recipe with these settings beside another, at a temperature. Where the family is trained,
    the drafter is the one that quality.py has trained of `trained`."""

    system: str
    claim: str
    whole: tuple[str, ...]  # the recipe and settings
    without: tuple[str, ...]
    heat: str = "greedy"
    trained: str | None = None
    whole_sets: tuple[str, ...] = ()  # with which the first arm's drafter was trained
    without_sets: tuple[str, ...] = ()  # the second one's
    price: float = 0.0  # of a drafted token, where a forward pass of the target costs 1
    counts_layers: bool = False  # a drafted token costs PRICE by the layers that it goes through
    fits: bool = False  # the first arm's tree is sized by these costs


@dataclass(frozen=True, slots=True)
class Piped:
    """A recipe and its stages with these settings beside another, which trains a drafter of its own
    for the same prompts: chains of `length`. No more than its steps are taken from quality.py."""

    system: str
    claim: str
    whole: tuple[str, ...]
    without: tuple[str, ...]
    length: int = 5
    heat: str = "greedy"


@dataclass(frozen=True, slots=True)
class Batched:
    """A batch policy at a load beside the best of `fixed` lengths (see ablation_batches.py)."""

    system: str
    claim: str
    batching: str
    users: int
    fixed: tuple[int, ...]
    setting: int | None = None
    fills: int | None = None  # tokens of a forward pass that costs no more than one token
    price: float = 0.1  # of a drafted level


@dataclass(frozen=True, slots=True)
class Crossed:
    """A translation of a draft's tokens beside another (None: plain decoding, whose tau is 1)."""

    system: str
    claim: str
    method: str
    without: str | None = None
    heat: str = "greedy"


@dataclass(frozen=True, slots=True)
class Stopped:
    """Chains of up to LONGEST tokens that a rule ends, with the best of its `thresholds` (None: its
    own), beside the best of the FIXED lengths: tokens a unit of cost, where a forward pass of the
    target costs 1 and a drafted token PRICE."""

    system: str
    claim: str
    rule: str
    heat: str = "greedy"
    trained: str = "small-lm"
    thresholds: tuple[float | None, ...] = (None,)


FIXED, LONGEST, PRICE = (1, 2, 3, 4, 6, 8), 8, 0.1


def _tree(policy: str, *more: str) -> tuple[str, ...]:
    return ("small-lm", f"serve.policy={policy}", *more)


def _option(name: str, value: str) -> tuple[str, ...]:
    return (f"drafter.options.{name}={value}",)


STATIC = ("serve.branch=[3,2,1,1]",)  # 21 nodes
SIZE = ("serve.nodes=21", "serve.length=4")
STATIC_ALONE = (*STATIC, "serve.nodes=null", "serve.acceptance=null")  # of a recipe with a tree
SELECTED = ("train.select=highest", "train.select_share=0.4")
SIZED = ("medusa", "serve.policy=hardware-tree", "serve.nodes=64")
UNTRAINED = ("train.learning_rate=1e-9",)
GATED, RNN = _option("correction", "gated"), _option("correction", "rnn")
MEMORY = _option("recurrent", "false")
OWN_DRAFTS, LAYERS = _option("free_rounds", "0"), _option("lattice_layers", "0")
NEAR = _option("window", "48")
FIRST = (*NEAR, *_option("sink", "4"))
MARGIN = (*_option("choice_weight", "0.125"), *_option("margin_weight", "0.125"))
CAUSAL = (*_option("causal", "true"), *_option("loss", "kl"), *_option("decay", "1.0"),
          *_option("d_pace", "null"))  # fmt: skip
TRAINED = (
    Trained("EAGLE", "the next token is read beside the state: acceptance collapses without it",
            "eagle", _option("read_tokens", "false")),
    Trained("EAGLE", "noise on the states that it learns from: deeper tokens are accepted more",
            "eagle", _option("noise", "0")),
    Trained("EAGLE-3", "trained on its own outputs (5 steps against 1)", "eagle3",
            _option("ttt_steps", "1")),
    Trained("EAGLE-3", "states of three depths, not of the last alone", "eagle3",
            _option("taps", "[8]")),
    Trained("EAGLE-3", "ahead of EAGLE (Vicuna-13B tau 6.6 against 4.8 of EAGLE-2)", "eagle3",
            "eagle"),
    Trained("EAGLE-3", "the same, sampled", "eagle3", "eagle", heat="T = 1"),
    Trained("M2R2", "the adapted stream is ahead of the plain exit behind the same layers", "m2r2",
            _option("adapts", "false")),
    Trained("M2R2", "its queries read the target's keys and values", "m2r2",
            _option("attends", "false")),
    Trained("M2R2", "learns to be where the target's last state is", "m2r2",
            _option("feature_weight", "0")),
    Trained("Jump", "a state is predicted, not the token's embedding put in its place", "jump",
            _option("predictor", "none")),
    Trained("Jump", "it is made of the last state, not of the token alone", "jump",
            _option("reads_state", "false")),
    Trained("Jump", "low-rank additions on drafted tokens alone", "jump",
            _option("rank", "null")),
    Trained("HASS", "trained on its own outputs: ahead of EAGLE (LLaMA2-7B tau 5.15 against 4.61)",
            "hass", "eagle"),
    Trained("HASS", "the same, sampled", "hass", "eagle", heat="T = 1"),
    Trained("HASS", "the same, one step against three", "hass", _option("ttt_steps", "1")),
    Trained("HASS", "top-K loss", "hass", _option("top_weight", "0")),
    Trained("CORAL", "states that agree from step to step: ahead of HASS (by .03 to .09 in speed)",
            "coral", "hass"),
    Trained("CORAL", "the same, its loss alone", "coral", _option("align_weight", "0")),
    Trained("FSPAD", "ahead of EAGLE (tau +.28 to +.48)", "fspad", "eagle"),
    Trained("FSPAD", "the same, sampled", "fspad", "eagle", heat="T = 1"),
    Trained("FSPAD", "feature sampling", "fspad", _option("feature_sampling", "false")),
    Trained("FSPAD", "a readout of its own for the next state", "fspad",
            _option("split_readout", "false")),
    Trained("Jakiro", "ahead of EAGLE, most of all when sampling", "jakiro", "eagle", "served"),
    Trained("Jakiro", "the same, sampled", "jakiro", "eagle", heat="T = 1"),
    Trained("Jakiro", "the contrast branch", "jakiro", _option("contrast", "false"), "served"),
    Trained("Gumiho", "two serial tokens, then parallel heads: ahead of EAGLE (tau 4.89, 4.68)",
            "gumiho", "eagle"),
    Trained("Gumiho", "the same, sampled", "gumiho", "eagle", heat="T = 1"),
    Trained("Falcon", "glancing", "falcon",
            (*_option("glance", "0"), *_option("glance_last", "0"))),
    Trained("Hydra", "ahead of Medusa (Vicuna-7B tau 3.36 against 2.39)", "hydra", "medusa"),
    Trained("Hydra", "the same, sampled", "hydra", "medusa", heat="T = 1"),
    Trained("Hydra", "the same, drafted tokens hidden", "hydra", _option("grounded", "false")),
    Trained("Clover", "ahead of Medusa (throughput +37 to +57 %)", "clover", "medusa"),
    Trained("Clover", "the same, drafted tokens hidden", "clover", _option("regressive", "false")),
    Trained("Recurrent Drafter", "a recurrence over drafted tokens: ahead of Medusa", "recurrent",
            "medusa"),
    Trained("Chimera", "trigrams", "chimera", _option("trigrams", "false")),
    Trained("Chimera", "the whole text's states", "chimera", _option("context", "false")),
    Trained("Chimera", "ahead of Medusa (2.7x on average)", "chimera", "medusa"),
    Trained("MLP speculator", "the token drafted before is read", "mlp-speculator",
            _option("read_tokens", "false")),
    Trained("GliDe", "no glimpse in training of what will not be there (block mask)", "glide",
            _option("strict", "false")),
    Trained("Mixture of Attentions", "ahead of EAGLE-2 (accepted length +25 %)", "moa", "eagle"),
    Trained("Mixture of Attentions", "the same, sampled", "moa", "eagle", heat="T = 1"),
    Trained("Mixture of Attentions", "attention over layers (about 6 % of speed)", "moa",
            _option("layer_attention", "false")),
    Trained("DSpark", "a block corrected for the token before", "dspark", "dflash"),
    Trained("DSpark", "the same, sampled", "dspark", "dflash", heat="T = 1"),
    Trained("DSpark", "a gate of slot and token, not the token alone", "dspark", (), whole=GATED),
    Trained("DSpark", "the same, sampled", "dspark", (), whole=GATED, heat="T = 1"),
    Trained("DSpark", "a memory of the draft, not the last token alone", "dspark", (), whole=RNN),
    Trained("DSpark", "the same, sampled", "dspark", (), whole=RNN, heat="T = 1"),
    Trained("Domino", "ahead of DFlash", "domino", "dflash"),
    Trained("Domino", "the same, sampled", "domino", "dflash", heat="T = 1"),
    Trained("Domino", "a memory of the draft, not the last token alone", "domino", MEMORY),
    Trained("Domino", "the same, sampled", "domino", MEMORY, heat="T = 1"),
    Trained("XPress", "ahead of DFlash", "xpress", "dflash"),
    Trained("XPress", "the same, sampled", "xpress", "dflash", heat="T = 1"),
    Trained("XPress", "trained on its own drafts, too (3 rounds, not 0)", "xpress", OWN_DRAFTS),
    Trained("XPress", "the same, sampled", "xpress", OWN_DRAFTS, heat="T = 1"),
    Trained("LiLiCorr", "ahead of DFlash", "lilicorr", "dflash"),
    Trained("LiLiCorr", "the same, sampled", "lilicorr", "dflash", heat="T = 1"),
    Trained("LiLiCorr", "candidates attend to each other (2 layers, not 0)", "lilicorr", LAYERS),
    Trained("LiLiCorr", "the same, sampled", "lilicorr", LAYERS, heat="T = 1"),
    Trained("LiLiCorr", "its margin term", "lilicorr", (), whole=MARGIN),
    Trained("LiLiCorr", "the same, sampled", "lilicorr", (), whole=MARGIN, heat="T = 1"),
    Trained("DFlash", "ahead of EAGLE-3 (Qwen3-8B tau 6.54 against 3.71)", "dflash", "eagle3"),
    Trained("Block windows", "the first 4 features beside the newest 48", "dflash", NEAR,
            whole=FIRST),
    Trained("Block windows", "the same, sampled", "dflash", NEAR, whole=FIRST, heat="T = 1"),
    Trained("Block windows", "the newest 48 features, not all", "dflash", (), whole=NEAR),
    Trained("Block windows", "the same, sampled", "dflash", (), whole=NEAR, heat="T = 1"),
    Trained("Hidden Transfer", "ahead of Medusa's heads", "hidden-transfer", "medusa"),
    Trained("Superposed decoding", "several drafts for the forwards of one", "superposed", (),
            "served", without_shape="chain"),
    Trained("GliDe with CaPE", "siblings where the chain is unsure (2.17x to 2.61x)", "glide", (),
            "served", without_shape="chain"),
    Trained("DistillSpec", "the target's distribution, not its text", "small-lm",
            _option("loss", "ce")),
    Trained("LK losses", "-log alpha, not KL (tau +8 to +10 %)", "small-lm", (),
            whole=_option("loss", "lk_alpha")),
    Trained("AdaSPEC", "the tokens it can still learn, not all (alpha +1 to +5 points)", "small-lm",
            (), whole=SELECTED),
    Trained("AdaSPEC", "the same, against those it cannot", "small-lm",
            ("train.select=lowest", "train.select_share=0.4"), whole=SELECTED),
    Trained("Medusa-2", "heads and target together, not heads alone", "medusa", (),
            whole=("train.joint.rank=32", "train.joint.weight=0.2")),
    Trained("P-EAGLE", "one pass for the whole draft, about as often right as EAGLE-3's five",
            "p-eagle", "eagle3"),
    Trained("Kangaroo", "an adapter behind the first layers, against their plain exit", "kangaroo",
            UNTRAINED),
    Trained("Kangaroo", "an attention is enough: none lost without an MLP", "kangaroo",
            _option("mlp", "true")),
    Trained("EESD's layer", "a trained layer behind the first one, against an untrained one",
            "eesd", UNTRAINED),
    Trained("PaSS", "look-ahead tokens that learned", "pass", UNTRAINED),
    Trained("CORAL's LM head", "in groups, of which a quarter is read: none lost", "coral",
            _option("head_groups", "null")),
    Trained("Improved blockwise drafts", "n-grams choose among the heads' tokens (+5 to +21 %)",
            "blockwise", (), whole=_option("rescore", "ngram")),
)  # fmt: skip
SERVED = (
    Served("EAGLE-2", "a tree that follows confidence accepts more than a fixed one, 21 nodes",
           _tree("dynamic-tree", *SIZE), _tree("static-tree", *STATIC), trained="small-lm"),
    Served("EAGLE-2", "the same, EAGLE-3's layer",
           ("eagle3", "serve.policy=dynamic-tree", *SIZE),
           ("eagle3", "serve.policy=static-tree", *STATIC), trained="eagle3"),
    Served("OPT-Tree", "most expected acceptance for 21 nodes",
           _tree("opt-tree", "serve.nodes=21", "serve.length=8"),
           _tree("static-tree", *STATIC), trained="small-lm"),
    Served("Sequoia", "a tree for measured acceptances, 21 nodes",
           _tree("sequoia", "serve.nodes=21", "serve.length=6"),
           _tree("static-tree", *STATIC), trained="small-lm"),
    Served("DySpec", "a sampled tree that follows confidence, 21 nodes",
           _tree("dyspec", "serve.nodes=21", "serve.length=8"),
           _tree("static-tree", *STATIC), "T = 1", "small-lm"),
    Served("RSD-C", "siblings drawn without replacement, against independent ones",
           _tree("static-tree", *STATIC, "serve.rule=recursive"),
           _tree("mcsd", *STATIC, "serve.rule=multi-round"), "T = 1", "small-lm"),
    Served("RSD-C", "siblings without replacement, against independent ones, both by traversal",
           _tree("static-tree", *STATIC), _tree("mcsd", *STATIC), "T = 1", "small-lm"),
    Served("RSD-S", "a sampled beam, 16 nodes",
           _tree("rsd", "serve.beam=4", "serve.length=4"),
           _tree("static-tree", "serve.branch=[4,1,1,1]"), "T = 1", "small-lm"),
    Served("SpecInfer and MCSD", "several candidates by its own rule, not one",
           _tree("mcsd", *STATIC, "serve.rule=multi-round"),
           _tree("chain", "serve.length=4"), "T = 1", "small-lm"),
    Served("SpecInfer and MCSD", "several candidates by traversal, not one",
           _tree("mcsd", *STATIC), _tree("chain", "serve.length=4"), "T = 1", "small-lm"),
    Served("SpecTr", "several candidates by its own rule, not one (1.37x)",
           _tree("mcsd", *STATIC, "serve.rule=spectr"),
           _tree("chain", "serve.length=4"), "T = 1", "small-lm"),
    Served("CaPE", "the same for a small language model",
           _tree("cape", "serve.length=5"), _tree("chain", "serve.length=5"), trained="small-lm"),
    Served("Block verification", "a block accepted as one (5 to 8 % of speed)",
           _tree("chain", "serve.length=5", "serve.rule=block"),
           _tree("chain", "serve.length=5", "serve.rule=chain"), "T = 1", "small-lm"),
    Served("Traversal verification", "trees accepted from the leaves (accepted length +2 to +6 %)",
           _tree("static-tree", *STATIC, "serve.rule=traversal"),
           _tree("static-tree", *STATIC, "serve.rule=recursive"), "T = 1", "small-lm"),
    Served("Greedy multi-draft", "best tokens and one draw, against independent draws",
           _tree("top-plus-one", *STATIC),
           _tree("mcsd", *STATIC, "serve.rule=multi-round"), "T = 1", "small-lm"),
    Served("Greedy multi-draft", "best tokens and one draw, against independent draws by traversal",
           _tree("top-plus-one", *STATIC), _tree("mcsd", *STATIC), "T = 1", "small-lm"),
    Served("Lookahead", "n-grams of its own Jacobi window (1.8x)", ("lookahead",), ("jacobi",)),
    Served("Suffix automaton", "the longest repeat, however long", ("suffix-automaton",),
           ("prompt-lookup",)),
    Served("Token Recycling", "ranks renewed while it writes, against a matrix of the corpus alone",
           ("token-recycling",), ("token-recycling", *_option("freeze", "true"))),
    Served("REST", "the corpus beside the text", ("rest",), ("prompt-lookup",)),
    Served("Hierarchy Drafting", "three databases, not the text alone", ("hierarchy",),
           ("hierarchy", *_option("order", "W"))),
    Served("Goose", "a spine of copies with branches, not a balanced tree (12 to 33 %)", ("goose",),
           ("goose", *_option("shape", "balanced"))),
    Served("Goose", "the same, against copies alone", ("goose",), ("prompt-lookup",)),
    Served("Goose", "the same, against recycled tokens alone", ("goose",), ("token-recycling",)),
    Served("DReSD", "retrieval by states, not by tokens (accepted length +65 %)", ("dresd",),
           ("rest",)),
    Served("DReSD", "the text itself beside the corpus", ("dresd",),
           ("dresd", *_option("own", "false"))),
    Served("FastCoT", "a window that slides takes fewer rounds than Jacobi's blocks", ("fastcot",),
           ("jacobi", "serve.length=8", "serve.nodes=8")),
    Served("ADED", "a tree that follows what was read, not ranks, 24 nodes", ("aded",),
           ("aded", *_option("maker", "ranks"))),
    Served("ADED", "the same, sampled", ("aded",), ("aded", *_option("maker", "ranks")), "T = 1"),
    Served("STAND", "drafts are drawn, not the best tokens, 21 nodes",
           ("stand", "serve.policy=static-tree", *STATIC_ALONE),
           ("stand", "serve.policy=dynamic-tree", *SIZE, "serve.acceptance=null"), "T = 1"),
    Served("STAND", "a tree for measured acceptances, 21 nodes", ("stand",),
           ("stand", "serve.policy=static-tree", *STATIC_ALONE), "T = 1"),
    Served("CopySpec", "ten tokens from the first place of three, against prompt lookup of ten",
           ("copyspec",), ("prompt-lookup", "serve.length=10")),
    Served("RASD", "the draft tree fused with what was retrieved, 24 nodes", ("rasd",),
           ("rasd", "serve.policy=dynamic-tree", "serve.nodes=24", "serve.length=6"),
           trained="rasd"),
    Served("Dynamic depth decoding", "ends where the beam is unsure, against a depth of six",
           ("ddd",), ("ddd", "serve.policy=dynamic-tree", "serve.length=6", "serve.threshold=null"),
           trained="eagle3"),
    Served("Multi-path block verification", "four paths at once, not one (by block)",
           _tree("paths", "serve.beam=4", "serve.length=5"),
           _tree("chain", "serve.length=5", "serve.rule=block"), "T = 1", "small-lm"),
    Served("Speculative Jacobi", "drafts accepted by probability", ("speculative-jacobi",),
           ("jacobi",), "T = 1"),
    Served("S2D", "the deepest of three exits: as good as a draft trained alone",
           ("sorted", *_option("only", "2")), ("sorted",), trained="sorted",
           without_sets=_option("exits", "[3]")),
    Served("S2D", "the same, the first exit",
           ("sorted", *_option("only", "0")), ("sorted",), trained="sorted",
           without_sets=(*_option("layers", "1"), *_option("exits", "[1]"))),
    Served("S2D", "leaves where it is sure, against the deepest exit alone", ("sorted",),
           ("sorted", *_option("only", "2")), trained="sorted", counts_layers=True),
    Served("S2D", "the same, against the second exit alone", ("sorted",),
           ("sorted", *_option("only", "1")), trained="sorted", counts_layers=True),
    Served("S2D", "the same, against the first exit alone", ("sorted",),
           ("sorted", *_option("only", "0")), trained="sorted", counts_layers=True),
    Served("Trees sized for the device", "as large as pays where a node costs .05, not 24 nodes",
           SIZED, ("medusa", "serve.policy=hardware-tree", "serve.nodes=24"), trained="medusa",
           price=0.05, fits=True),
    Served("Trees sized for the device", "the same where it costs .001",
           SIZED, ("medusa", "serve.policy=hardware-tree", "serve.nodes=24"), trained="medusa",
           price=0.001, fits=True),
    *(
        Served("JetSpec", f"a causal block under KL, not DFlash's, in trees of {nodes} nodes",
               ("jetspec", f"serve.nodes={nodes}"),
               ("dflash", "serve.policy=marginal-tree", f"serve.nodes={nodes}"), heat, "dflash",
               whole_sets=CAUSAL)
        for nodes in (16, 32) for heat in ("greedy", "T = 1")
    ),
)  # fmt: skip
STOPPED = (
    Stopped("SVIP", "stops by entropy: up to 20 % faster than a fixed length", "svip",
            thresholds=(0.2, 0.3, 0.4)),
    Stopped("SpecDec++", "a head ends the draft: 7 to 11 % over the tuned fixed length",
            "specdec-pp", thresholds=(0.3, 0.5, 0.7)),
    Stopped("DISCO", "a classifier ends the draft: 10 % over the best fixed length", "disco",
            thresholds=(0.3, 0.5, 0.7)),
    Stopped("AdaEAGLE", "a predicted length: 66.4 tokens/s against 64.7 of the best fixed one",
            "ada-eagle", trained="eagle"),
    Stopped("EESD", "Thompson sampling decides how far to draft", "thompson"),
)  # fmt: skip
_ANSWERS = (
    "{regenerate: true, prompts: 1000, prompt_tokens: 48, new_tokens: 96, temperature: 0.8, "
    "greedy_share: 0.5}"
)
_TEXT, _CODE = "{source: 'corpus:docstring', limit_tokens: 700000}", "{limit_tokens: 1000000}"


def _stages(**stages: tuple[str, int, float]) -> str:
    """Data, steps and learning rate of each stage."""
    parts = [
        f"{name}: {{data: {data}, train: {{steps: {steps}, learning_rate: {rate}}}}}"
        for name, (data, steps, rate) in stages.items()
    ]
    return "stages={" + ", ".join(parts) + "}"


def _fastdraft(**stages: tuple[str, int, float]) -> tuple[str, ...]:
    return ("fastdraft", "train.rows=4", _stages(**stages))


def _mlp(**stages: tuple[str, int, float]) -> tuple[str, ...]:
    return ("mlp-speculator", "train.rows=4", _stages(**stages))


_RAW = "{regenerate: false, limit_tokens: 1000000}"
_BEFORE = {"pretrain": (_TEXT, 41, 5e-3), "continue": (_CODE, 51, 4e-3)}
_LONG = {"pretrain": (_CODE, 120, 5e-3)}
PIPED = (
    Piped("FastDraft", "text, code, then answers of the target, against as many steps on answers",
          _fastdraft(**_BEFORE, align=(_ANSWERS, 28, 2e-3)),
          _fastdraft(align=(_ANSWERS, 120, 5e-3))),
    Piped("FastDraft", "the same, against as many steps on text and code",
          _fastdraft(**_BEFORE, align=(_ANSWERS, 28, 2e-3)),
          _fastdraft(pretrain=(_TEXT, 41, 5e-3), **{"continue": (_CODE, 79, 4e-3)})),
    Piped("MLP speculator's stages", "a second stage on what the target writes, against text alone",
          _mlp(text=(_RAW, 72, 8e-3), written=(_ANSWERS, 48, 4e-3)),
          _mlp(text=(_RAW, 120, 8e-3)), length=4),
    Piped("MLP speculator's stages", "text first, against as many steps on what the target writes",
          _mlp(text=(_RAW, 72, 8e-3), written=(_ANSWERS, 48, 4e-3)),
          _mlp(written=(_ANSWERS, 120, 8e-3)), length=4),
    Piped("Scylla", "pre-training: 120 steps on text before 60 on answers",
          _fastdraft(**_LONG, align=(_ANSWERS, 60, 4e-3)),
          _fastdraft(align=(_ANSWERS, 60, 4e-3))),
)  # fmt: skip
BATCHED = (
    Batched("BASS", "one length that follows the batch, 8 users", "bass", 8, (1, 2, 3, 4, 6)),
    Batched("SmartSpec", "as fast as the best fixed length, 4 users", "goodput", 4,
            (0, 2, 3, 4), fills=16),
    Batched("SmartSpec", "the same, 16 users", "goodput", 16, (0, 1, 2), fills=16),
    Batched("SmartSpec", "the same, against drafts of two tokens", "goodput", 16, (2,), fills=16),
    Batched("TETRIS", "24 tokens a round for 8 users, where they are likeliest, against 3 each",
            "tetris", 8, (3,), setting=24, price=0.0),
)  # fmt: skip
CROSSED = (
    Crossed("TLI", "a draft of other tokens is of use, by the tokens that both have (1.7x)", "tli"),
    Crossed("SLEM", "matched as strings, against the tokens that both have (2.8x, 1.7x)", "slem",
            "tli"),
    Crossed("SLEM", "the same, sampled", "slem", "tli", "T = 1"),
)  # fmt: skip
