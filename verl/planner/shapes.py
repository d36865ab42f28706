"""Sizes of a decoder: parameters, FLOPs and bytes per token. Built-in shapes for simulations without files."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from verl.modeling.model_types import ATTENTION_LAYERS
from verl.registry import did_you_mean


@dataclass(frozen=True)
class VisionShape:
    """What reads the images of a vision-language model.

    Attributes:
        parameters: of the vision tower and its projection.
        tower: of the tower alone, which `model.freeze_vision_tower` does not train.
        layers, hidden, mlp: sizes of the tower.
        patches: patches of an image token.
        values: numbers of a patch, as the processor returns them.
    """

    parameters: int
    tower: int
    layers: int
    hidden: int
    mlp: int
    patches: int
    values: int


@dataclass(frozen=True)
class ModelShape:
    """A Llama-like decoder: attention with grouped key heads, and a gated MLP or a mixture of such experts.

    Attributes:
        mlp: intermediate size of the MLP of layers without experts.
        head_dim: size of a head.
        tied: the output layer is the embedding.
        qkv_bias: queries, keys and values have biases.
        head_norms: queries and keys are normalized per head.
        experts: experts of a layer; 0: no mixture of experts. active_experts: those that a token is computed by.
        expert_mlp: intermediate size of one expert.
        shared_mlp: intermediate size of the expert that computes every token; 0: there is none.
        dense_layers: layers without experts, of a mixture of experts.
        vision: of a vision-language model; None for a text model.
        model_type: that of its config.json; "": not known.
        padded: the training engine pads rows (`modeling.packing.padding_reason`), as far as the config says.
    """

    name: str
    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = False
    qkv_bias: bool = False
    head_norms: bool = False
    experts: int = 0
    active_experts: int = 0
    expert_mlp: int = 0
    shared_mlp: int = 0
    dense_layers: int = 0
    vision: VisionShape | None = None
    model_type: str = ""
    padded: bool = False

    @property
    def q_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def sparse_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def attention_matrices(self) -> int:
        """Elements of the matrices of the attention of a layer."""
        return self.hidden * (self.q_size + 2 * self.kv_size) + self.q_size * self.hidden

    @property
    def expert_parameters(self) -> int:
        """Parameters of the experts of all layers, without shared ones."""
        return self.sparse_layers * self.experts * 3 * self.hidden * self.expert_mlp

    def matrices(self, experts: float | None = None) -> float:
        """Elements of the matrices of all layers. experts: of a layer that count; None: those that compute one
        token."""
        count = self.active_experts if experts is None else experts
        sparse = count * self.expert_mlp + self.shared_mlp
        router = self.hidden * self.experts
        return (
            self.layers * self.attention_matrices
            + (self.layers - self.sparse_layers) * 3 * self.hidden * self.mlp
            + self.sparse_layers * (3 * self.hidden * sparse + router)
        )

    def experts_hit(self, tokens: float) -> float:
        """Expected number of experts of a layer that compute at least one of `tokens` tokens, routed evenly."""
        return self.experts * (1 - (1 - self.active_experts / self.experts) ** tokens) if self.experts else 0.0

    @property
    def mlp_width(self) -> float:
        """Intermediate size that a token passes, as the mean of the layers."""
        sparse = self.active_experts * self.expert_mlp + self.shared_mlp
        return (self.sparse_layers * sparse + (self.layers - self.sparse_layers) * self.mlp) / self.layers

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer; of a mixture of experts, of one with experts."""
        layer = replace(self, layers=1, dense_layers=0, vision=None, vocabulary=0)
        return layer.parameters() - self.hidden

    @property
    def embedding(self) -> int:
        """Elements of the embedding; the output layer has as many."""
        return self.vocabulary * self.hidden

    def parameters(self, value_head: bool = False) -> int:
        """Parameters of the model. value_head: with one output instead of logits."""
        bias = (self.q_size + 2 * self.kv_size) * self.qkv_bias
        vectors = 2 * self.hidden + bias + 2 * self.head_dim * self.head_norms
        gates = self.sparse_layers * self.hidden * (self.shared_mlp > 0)
        head = self.hidden if value_head else 0 if self.tied else self.embedding
        layers = self.matrices(self.experts) + self.layers * vectors + gates
        return layers + self.embedding + self.hidden + head + (self.vision.parameters if self.vision is not None else 0)

    def lora_parameters(self, rank: int, experts: bool = False) -> int:
        """Parameters of LoRA adapters of this rank on every matrix of every layer. experts: also on those of experts,
        whose two matrices of a layer's input are one."""
        h, q, kv = self.hidden, self.q_size, self.kv_size
        attention = (h + q) + 2 * (h + kv) + (q + h)
        sparse = 3 * (h + self.shared_mlp) * (self.shared_mlp > 0)
        sparse += self.experts * (2 * h + 3 * self.expert_mlp) * experts
        dense = (self.layers - self.sparse_layers) * 3 * (h + self.mlp)
        return rank * (self.layers * attention + dense + self.sparse_layers * sparse)

    def kv_bytes(self, itemsize: int) -> int:
        """Bytes of the KV cache per token."""
        return 2 * self.layers * self.kv_size * itemsize

    def largest_tensor(self) -> int:
        """Elements of the largest parameter. The experts of a layer are one parameter."""
        experts = 2 * self.experts * self.hidden * self.expert_mlp
        return max(self.embedding, self.hidden * self.mlp, experts)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str = "") -> "ModelShape":
        """The shape that a `config.json` describes. Raises ValueError for latent attention, or a config without the
        sizes of a Llama-like decoder."""
        name = name or "the model"
        if config.get("kv_lora_rank"):
            raise ValueError(f"{name} has multi-head latent attention, which the planner does not model")
        needed = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
        missing = [key for key in needed if not isinstance(config.get(key), int)]
        if missing:
            raise ValueError(f"the config of {name} has no {', '.join(missing)}: the planner needs them")
        # without the intermediate size, which a mixture of experts does not need
        sizes = (*(key for key in needed if key != "intermediate_size"), "num_key_value_heads", "head_dim")
        settings = {key: config[key] for key in sizes if config.get(key) is not None}
        wrong = [f"{key}={size}" for key, size in settings.items() if not (isinstance(size, int) and size > 0)]
        if wrong:
            raise ValueError(f"the config of {name} has {', '.join(wrong)}: expected whole numbers of at least 1")
        if config["hidden_size"] < config["num_attention_heads"] and not config.get("head_dim"):
            sizes = " and ".join(f"{key}={config[key]}" for key in ("hidden_size", "num_attention_heads"))
            raise ValueError(f"the config of {name} has {sizes}: expected heads of at least one element")
        layers, hidden, mlp, heads, vocabulary = (config[key] for key in needed)
        kind = config.get("model_type", "")
        return cls(
            name,
            layers,
            hidden,
            mlp,
            heads,
            config.get("num_key_value_heads") or heads,
            config.get("head_dim") or hidden // heads,
            vocabulary,
            tied=bool(config.get("tie_word_embeddings")),
            qkv_bias=kind in _BIASED or bool(config.get("attention_bias")),
            head_norms=kind in _HEAD_NORMS,
            model_type=kind,
            padded=not set(config.get("layer_types") or ()) <= {*ATTENTION_LAYERS},
            **_experts(config, name, layers, mlp),
        )


#: model types, also of the language models of vision-language models
_BIASED = ("qwen2", "qwen2_moe", "qwen2_vl_text", "qwen2_5_vl_text")
_HEAD_NORMS = ("qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text")


def _experts(config: Mapping[str, Any], name: str, layers: int, mlp: int) -> dict[str, int]:
    """The sizes of a mixture of experts; empty if the model is none."""
    experts = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts") or 0
    if experts in (0, 1):
        return {}
    active = config.get("num_experts_per_tok")
    if not isinstance(active, int):
        raise ValueError(f"the config of {name} has {experts} experts, but no num_experts_per_tok")
    if not 1 <= active <= experts:
        raise ValueError(
            f"the config of {name} has {experts} experts and num_experts_per_tok={active}: expected 1 to the number "
            "of experts"
        )
    dense = set(config.get("mlp_only_layers") or ())
    step = config.get("decoder_sparse_step") or 1
    return {
        "experts": experts,
        "active_experts": active,
        "expert_mlp": config.get("moe_intermediate_size") or mlp,
        "shared_mlp": config.get("shared_expert_intermediate_size") or 0,
        "dense_layers": sum(i in dense or bool((i + 1) % step) for i in range(layers)),
    }


def _qwen(name: str, layers: int, hidden: int, mlp: int, heads: int, kv_heads: int, vocabulary: int) -> ModelShape:
    tied = hidden <= 2048
    shape = ModelShape(
        name, layers, hidden, mlp, heads, kv_heads, hidden // heads, vocabulary, tied=tied, qkv_bias=True
    )
    return replace(shape, model_type="qwen2")


def _llama(name: str, layers: int, hidden: int, mlp: int, heads: int, kv_heads: int) -> ModelShape:
    return ModelShape(name, layers, hidden, mlp, heads, kv_heads, 128, 32000, model_type="llama")


def _qwen3(name: str, layers: int, hidden: int, mlp: int, heads: int, tied: bool = False, **more: int) -> ModelShape:
    kv_heads = more.pop("kv_heads", 8)
    kind = "qwen3_moe" if "experts" in more else "qwen3"
    shape = ModelShape(name, layers, hidden, mlp, heads, kv_heads, 128, 151936, tied=tied, head_norms=True, **more)
    return replace(shape, model_type=kind)


#: name -> shape. 0.5B, 1.5B, 3B, 7B, 14B, 32B and 72B are Qwen2.5, 13B, 34B and 70B Llama 2 and Code Llama, 405B is
#: Llama 3.1, the others with one size are Qwen3. Names with "A": mixtures of experts, with the active parameters
BUILT_IN: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _qwen("0.5B", 24, 896, 4864, 14, 2, 151936),
        _qwen3("0.6B", 28, 1024, 3072, 16, tied=True),
        _qwen("1.5B", 28, 1536, 8960, 12, 2, 151936),
        _qwen3("1.7B", 28, 2048, 6144, 16, tied=True),
        _qwen("3B", 36, 2048, 11008, 16, 2, 151936),
        _qwen3("4B", 36, 2560, 9728, 32, tied=True),
        _qwen("7B", 28, 3584, 18944, 28, 4, 152064),
        _qwen3("8B", 36, 4096, 12288, 32),
        _qwen("14B", 48, 5120, 13824, 40, 8, 152064),
        _qwen("32B", 64, 5120, 27648, 40, 8, 152064),
        _qwen("72B", 80, 8192, 29568, 64, 8, 152064),
        _llama("Llama-7B", 32, 4096, 11008, 32, 32),
        _llama("13B", 40, 5120, 13824, 40, 40),
        _llama("34B", 48, 8192, 22016, 64, 8),
        _llama("70B", 80, 8192, 28672, 64, 8),
        replace(_llama("405B", 126, 16384, 53248, 128, 8), vocabulary=128256),
        _qwen3("30B-A3B", 48, 2048, 6144, 32, kv_heads=4, experts=128, active_experts=8, expert_mlp=768),
        _qwen3("235B-A22B", 94, 4096, 12288, 64, kv_heads=4, experts=128, active_experts=8, expert_mlp=1536),
        replace(
            _llama("Mixtral-8x7B", 32, 4096, 14336, 32, 8),
            **{"model_type": "mixtral", "experts": 8, "active_experts": 2, "expert_mlp": 14336},
        ),
    )
}


def built_in(name: str) -> ModelShape:
    """The built-in shape of this name. Raises ValueError if there is none."""
    match = next((shape for key, shape in BUILT_IN.items() if key.lower() == name.lower()), None)
    if match is None:
        raise ValueError(f"there is no built-in model {name!r}: {did_you_mean(name, BUILT_IN)}")
    return match
