"""GPT-2 under the parameter names of Hugging Face and nanoGPT, so that their checkpoints load by name and go on.

Owns: the network and its initialisation. Its matrices are those of nn.Linear, as nanoGPT's are; Hugging Face's stand the
other way round, which trainer/foreign sees to. Must not know: data, losses, the Trainer.
Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from trainer.errors import ConfigError

ACTIVATIONS = {"gelu_tanh": "tanh", "gelu": "none"}


class GPT2(nn.Module):
    """Token ids int64 [B, T] to logits [B, T, vocab_size]; position t sees tokens 0..t only.

    Args:
        vocab_size, max_length: number of token ids (50257 for the released ones), longest T (1024).
        dim, num_layers, num_heads: width, depth, heads; dim must be a multiple of num_heads.
        dropout: probability, on the embedding, the attention and both branches of each block; 0 is off.
        bias: biases in linear layers and norms (nanoGPT's default has none).
        activation: gelu_tanh (Hugging Face) or gelu (nanoGPT).
    """

    def __init__(
        self,
        vocab_size: int = 50257,
        max_length: int = 1024,
        dim: int = 768,
        num_layers: int = 12,
        num_heads: int = 12,
        dropout: float = 0.0,
        bias: bool = True,
        activation: str = "gelu_tanh",
    ) -> None:
        super().__init__()
        if dim % num_heads or activation not in ACTIVATIONS:
            raise ConfigError(
                f"model.dim={dim} must be a multiple of model.num_heads={num_heads}, and model.activation={activation} one of"
                f" {', '.join(ACTIVATIONS)}"
            )
        self.vocab_size, self.max_length = vocab_size, max_length
        blocks = (Block(dim, num_heads, dropout, bias, ACTIVATIONS[activation]) for _ in range(num_layers))
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocab_size, dim),
                "wpe": nn.Embedding(max_length, dim),
                "h": nn.ModuleList(blocks),
                "ln_f": nn.LayerNorm(dim, bias=bias),
            }
        )
        self.dropout = nn.Dropout(dropout)
        self.lm_head = nn.Linear(dim, vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight
        self.init_weights()

    def init_weights(self) -> None:
        """Normal weights of width 0.02, smaller where branches end; norms 1, biases 0."""
        for name, module in self.named_modules():
            if isinstance(module, nn.LayerNorm):
                nn.init.ones_(module.weight)
            elif isinstance(module, (nn.Linear, nn.Embedding)):
                narrow = math.sqrt(2 * len(self.transformer.h)) if name.endswith("c_proj") else 1.0
                nn.init.normal_(module.weight, std=0.02 / narrow)
            if isinstance(module, (nn.LayerNorm, nn.Linear)) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def fully_sharded_modules(self) -> list[nn.Module]:
        """What ddp_backend=fully_sharded gathers and frees as one: a block at a time."""
        return list(self.transformer.h)

    def forward(self, tokens: Tensor, cache: list | None = None) -> Tensor:
        """Logits of all positions; with a `cache`, which this model does not fill, those of the last one alone."""
        length = tokens.shape[1]
        if length > self.max_length:
            raise ValueError(f"{length} tokens, but the model's max_length is {self.max_length}")
        x = self.dropout(self.transformer.wte(tokens) + self.transformer.wpe.weight[:length])
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x if cache is None else x[:, -1:]))

    def new_cache(self) -> list:
        return []


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)); x is [B, T, dim]."""

    def __init__(self, dim: int, num_heads: int, dropout: float, bias: bool, gelu: str) -> None:
        super().__init__()
        self.num_heads, self.attention_dropout = num_heads, dropout
        self.ln_1 = nn.LayerNorm(dim, bias=bias)
        self.attn = nn.ModuleDict(
            {"c_attn": nn.Linear(dim, 3 * dim, bias=bias), "c_proj": nn.Linear(dim, dim, bias=bias)}
        )
        self.ln_2 = nn.LayerNorm(dim, bias=bias)
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(dim, 4 * dim, bias=bias), "c_proj": nn.Linear(4 * dim, dim, bias=bias)}
        )
        self.dropout = nn.Dropout(dropout)
        self.gelu = gelu

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attn.c_proj(self.attend(self.ln_1(x))))
        hidden = F.gelu(self.mlp.c_fc(self.ln_2(x)), approximate=self.gelu)
        return x + self.dropout(self.mlp.c_proj(hidden))

    def attend(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        qkv = self.attn.c_attn(x).view(batch, length, 3, self.num_heads, dim // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B, heads, T, dim / heads]
        dropout = self.attention_dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return y.transpose(1, 2).reshape(batch, length, dim)
