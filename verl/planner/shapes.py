"""Sizes of a decoder: parameters, FLOPs and bytes per token. Built-in shapes for simulations without files."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl.registry import did_you_mean


@dataclass(frozen=True)
class ModelShape:
    """A Llama-like decoder: attention with grouped key heads, and a gated MLP.

    Attributes:
        head_dim: size of a head.
        tied: the output layer is the embedding.
        qkv_bias: queries, keys and values have biases.
        head_norms: queries and keys are normalized per head.
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

    @property
    def q_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def layer_matrices(self) -> int:
        """Elements of the matrices of a layer."""
        attention = self.hidden * (self.q_size + 2 * self.kv_size) + self.q_size * self.hidden
        return attention + 3 * self.hidden * self.mlp

    @property
    def layer_parameters(self) -> int:
        bias = (self.q_size + 2 * self.kv_size) * self.qkv_bias
        return self.layer_matrices + 2 * self.hidden + bias + 2 * self.head_dim * self.head_norms

    @property
    def embedding(self) -> int:
        """Elements of the embedding; the output layer has as many."""
        return self.vocabulary * self.hidden

    def parameters(self, value_head: bool = False) -> int:
        """Parameters of the model. value_head: with one output instead of logits."""
        head = self.hidden if value_head else 0 if self.tied else self.embedding
        return self.layers * self.layer_parameters + self.embedding + self.hidden + head

    def lora_parameters(self, rank: int) -> int:
        """Parameters of LoRA adapters of this rank on every matrix of every layer."""
        h, q, kv, mlp = self.hidden, self.q_size, self.kv_size, self.mlp
        sides = (h + q) + 2 * (h + kv) + (q + h) + 3 * (h + mlp)
        return self.layers * rank * sides

    def kv_bytes(self, itemsize: int) -> int:
        """Bytes of the KV cache per token."""
        return 2 * self.layers * self.kv_size * itemsize

    def largest_tensor(self) -> int:
        """Elements of the largest parameter."""
        return max(self.embedding, self.hidden * self.mlp)

    @classmethod
    def of(cls, config: Mapping[str, Any], name: str = "") -> "ModelShape":
        """The shape that a `config.json` describes.

        Raises:
            ValueError: a mixture of experts, or a config without the sizes of a Llama-like decoder.
        """
        if config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts"):
            raise ValueError(f"{name or 'the model'} is a mixture of experts, which the planner does not model")
        needed = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
        missing = [key for key in needed if not isinstance(config.get(key), int)]
        if missing:
            raise ValueError(f"the config of {name or 'the model'} has no {', '.join(missing)}: the planner needs them")
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
            qkv_bias=kind == "qwen2" or bool(config.get("attention_bias")),
            head_norms=kind == "qwen3",
        )


def _qwen(name: str, layers: int, hidden: int, mlp: int, heads: int, kv_heads: int, vocabulary: int) -> ModelShape:
    tied = hidden <= 2048
    return ModelShape(name, layers, hidden, mlp, heads, kv_heads, hidden // heads, vocabulary, tied=tied, qkv_bias=True)


def _llama(name: str, layers: int, hidden: int, mlp: int, heads: int, kv_heads: int) -> ModelShape:
    return ModelShape(name, layers, hidden, mlp, heads, kv_heads, 128, 32000)


#: name -> shape. Sizes of Qwen2.5 up to 32B; 13B, 34B and 70B are those of Llama 2 and Code Llama
BUILT_IN: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _qwen("0.5B", 24, 896, 4864, 14, 2, 151936),
        ModelShape("0.6B", 28, 1024, 3072, 16, 8, 128, 151936, tied=True, head_norms=True),
        _qwen("1.5B", 28, 1536, 8960, 12, 2, 151936),
        _qwen("3B", 36, 2048, 11008, 16, 2, 151936),
        _qwen("7B", 28, 3584, 18944, 28, 4, 152064),
        _qwen("14B", 48, 5120, 13824, 40, 8, 152064),
        _qwen("32B", 64, 5120, 27648, 40, 8, 152064),
        _llama("Llama-7B", 32, 4096, 11008, 32, 32),
        _llama("13B", 40, 5120, 13824, 40, 40),
        _llama("34B", 48, 8192, 22016, 64, 8),
        _llama("70B", 80, 8192, 28672, 64, 8),
    )
}


def built_in(name: str) -> ModelShape:
    """The built-in shape of this name. Raises ValueError if there is none."""
    found = next((shape for key, shape in BUILT_IN.items() if key.lower() == name.lower()), None)
    if found is None:
        raise ValueError(f"there is no built-in model {name!r}: {did_you_mean(name, BUILT_IN)}")
    return found
