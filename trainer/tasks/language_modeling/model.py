"""A small decoder-only transformer over token ids, and how text is drawn from it.

Owns: the network and the sampling loop. It knows no data, no loss and no Trainer.
Pre-norm blocks, rotary (or learned) positions, torch's fused causal attention, squared-ReLU feed-forward. Each token
is also given a vector for every n-gram that ends in it, looked up by a hash: what short contexts tell then costs no
arithmetic, which on bytes is worth more than layers (see docs/new-task.md for the numbers).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.errors import ConfigError

POSITIONS = ("rotary", "learned")


class TransformerLM(nn.Module):
    """Token ids int64 [B, T] to logits [B, T, vocab_size]; position t sees tokens 0..t only.

    Args:
        vocab_size: number of token ids, 256 for bytes.
        dim, num_layers, num_heads: width, depth, heads; dim must be a multiple of num_heads (twice that for rotary).
        ffn_ratio: hidden width of the feed-forward over dim.
        max_length: longest T; learned positions have this many rows, rotary ones a table of this length.
        dropout: probability, on the embedding and on both branches of each block; 0 is off.
        tie_embeddings: the output layer uses the embedding's matrix (one tensor with two names).
        max_ngram: n-grams of 2 to this many tokens are embedded by hash; 0 or 1: none.
        ngram_rows, ngram_dim: rows of each table of n-grams, and their width before they are projected to dim.
        positions: "rotary" (Su et al. 2021, arXiv:2104.09864) or "learned".
        norm_eps: added to the mean square in every RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467).
    """

    def __init__(
        self,
        vocab_size: int = 256,
        dim: int = 192,
        num_layers: int = 4,
        num_heads: int = 4,
        ffn_ratio: float = 4.0,
        max_length: int = 256,
        dropout: float = 0.0,
        tie_embeddings: bool = False,
        positions: str = "rotary",
        max_ngram: int = 0,
        ngram_rows: int = 16384,
        ngram_dim: int = 64,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        _check(vocab_size, dim, num_layers, num_heads, max_length, dropout, positions)
        self.vocab_size, self.max_length, self.max_ngram = vocab_size, max_length, max_ngram
        self.embedding = nn.Embedding(vocab_size, dim)
        self.position_embedding = nn.Embedding(max_length, dim) if positions == "learned" else None
        self.ngrams = NgramEmbedding(max_ngram, ngram_rows, ngram_dim, dim) if max_ngram > 1 else None
        self.dropout = nn.Dropout(dropout)
        hidden = int(ffn_ratio * dim)
        self.blocks = nn.ModuleList(Block(dim, num_heads, hidden, dropout, norm_eps) for _ in range(num_layers))
        self.norm = nn.RMSNorm(dim, eps=norm_eps)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        if tie_embeddings:
            self.head.weight = self.embedding.weight
        cos, sin = rotary_table(max_length, dim // num_heads) if positions == "rotary" else (None, None)
        self.register_buffer("rotary_cos", cos, persistent=False)  # recomputed, so no checkpoint holds it
        self.register_buffer("rotary_sin", sin, persistent=False)
        self.init_weights()

    def init_weights(self) -> None:
        """Normal weights of width 1/sqrt(fan in), output layers of the residual branches zero: a block starts as x.

        Every parameter and buffer is set, so a model that was built on the meta device starts here.
        """
        for name, module in self.named_modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, nn.RMSNorm):
                nn.init.ones_(module.weight)
            elif isinstance(module, nn.Linear):
                if name.endswith(("out", "down", "head")) and module.weight is not self.embedding.weight:
                    nn.init.zeros_(module.weight)
                elif module.weight is not self.embedding.weight:
                    nn.init.normal_(module.weight, std=1 / math.sqrt(module.in_features))
        if self.rotary_cos is not None:
            cos, sin = rotary_table(self.max_length, 2 * self.rotary_cos.shape[1])
            self.rotary_cos.copy_(cos)
            self.rotary_sin.copy_(sin)

    def fully_sharded_modules(self) -> list[nn.Module]:
        """What ddp_backend=fully_sharded gathers and frees as one: a block at a time, the tables of n-grams apart."""
        return [*self.blocks, *([self.ngrams] if self.ngrams is not None else [])]

    def forward(self, tokens: Tensor, cache: list[list[Tensor]] | None = None) -> Tensor:
        """Logits of all positions, or with a `cache` those of the last one alone, [B, 1, vocab_size].

        cache: what `new_cache` gives and earlier calls have filled: keys and values of the first positions of `tokens`.
            An empty one is filled with any number of positions, after that each call adds one.
        """
        length, first = tokens.shape[1], cached_length(cache)
        if length > self.max_length:
            raise ValueError(f"{length} tokens, but the model's max_length is {self.max_length}")
        x = self.dropout(self._embed(tokens, first))
        rotary = None
        if self.rotary_cos is not None:
            rotary = (self.rotary_cos[first:length], self.rotary_sin[first:length])
        for i, block in enumerate(self.blocks):
            x = block(x, rotary, None if cache is None else cache[i])
        return self.head(self.norm(x if cache is None else x[:, -1:]))

    def _embed(self, tokens: Tensor, first: int) -> Tensor:
        """The vectors of the positions from `first` on."""
        begin = max(first - (self.max_ngram - 1), 0) if self.ngrams is not None else first
        x = self.embedding(tokens[:, begin:])
        if self.ngrams is not None:
            x = (x + self.ngrams(tokens[:, begin:]))[:, first - begin :]
        if self.position_embedding is not None:
            x = x + self.position_embedding.weight[first : tokens.shape[1]]
        return x

    def new_cache(self) -> list[list[Tensor]]:
        """For each block a list that holds nothing yet."""
        return [[] for _ in self.blocks]


def cached_length(cache: list[list[Tensor]] | None) -> int:
    return cache[0][0].shape[2] if cache and cache[0] else 0


class NgramEmbedding(nn.Module):
    """The sum of one vector for each n-gram that ends in a token, n from 2 to `max_ngram`: int64 [B, T] to [B, T, dim].

    An n-gram's row is a hash of its ids modulo the number of rows, so that rare ones share rows. N-grams that would
    begin before the first token are filled up with a value that no token has. Compare Huang et al. 2025,
    arXiv:2501.16975, and Pagnoni et al. 2024, arXiv:2412.09871.
    """

    def __init__(self, max_ngram: int, rows: int, ngram_dim: int, dim: int) -> None:
        super().__init__()
        self.rows = rows
        self.tables = nn.ModuleList(nn.Embedding(rows, ngram_dim) for _ in range(max_ngram - 1))
        self.project = nn.Linear(ngram_dim * (max_ngram - 1), dim, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        found = [table(row) for table, row in zip(self.tables, ngram_rows(tokens, len(self.tables) + 1, self.rows))]
        return self.project(torch.cat(found, dim=-1))


def ngram_rows(tokens: Tensor, max_ngram: int, rows: int) -> list[Tensor]:
    """For n = 2 .. max_ngram the row, int64 [B, T], of the n-gram that ends in each token; products wrap at 2^64."""
    result, state, earlier = [], tokens + 1, tokens + 1
    for _ in range(max_ngram - 1):
        earlier = F.pad(earlier[:, :-1], (1, 0))  # 0 is no token's value
        state = state * 1000003 + earlier
        mixed = (state ^ (state >> 29)) * 0x9E3779B97F4A7C1
        result.append((mixed >> 32) % rows)
    return result


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)); x is [B, T, dim]."""

    def __init__(self, dim: int, num_heads: int, hidden: int, dropout: float, norm_eps: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.RMSNorm(dim, eps=norm_eps)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.ffn_norm = nn.RMSNorm(dim, eps=norm_eps)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, past: list[Tensor] | None = None) -> Tensor:
        x = x + self.dropout(self.out(self.attend(self.attention_norm(x), rotary, past)))
        hidden = F.relu(self.up(self.ffn_norm(x)))
        return x + self.dropout(self.down(hidden * hidden))  # So et al. 2021, arXiv:2109.08668

    def attend(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, past: list[Tensor] | None) -> Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.num_heads, dim // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B, heads, T, dim / heads]
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        if past is not None:
            assert not past or length == 1, (length, "positions after those in the cache")
            k, v = (torch.cat((old, new), dim=2) for old, new in zip(past, (k, v))) if past else (k, v)
            past[:] = k, v
        y = F.scaled_dot_product_attention(q, k, v, is_causal=length == k.shape[2])
        return y.transpose(1, 2).reshape(batch, length, dim)


def rotary_table(length: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin float32 [length, head_dim / 2] of position x frequency, frequencies 1 to 1/10000."""
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.arange(length)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (x[i], x[i + D/2]) of x [..., T, D] by their angles; the result has x's dtype."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


def _check(vocab_size, dim, num_layers, num_heads, max_length, dropout, positions) -> None:
    """All impossible sizes in one error: a wrong head count would otherwise surface as a shape error in a view."""
    problems = [
        f"model.{name} must be at least 1, got {value}"
        for name, value in (
            ("vocab_size", vocab_size),
            ("dim", dim),
            ("num_layers", num_layers),
            ("num_heads", num_heads),
            ("max_length", max_length),
        )
        if value < 1
    ]
    if positions not in POSITIONS:
        problems.append(f"model.positions must be one of {', '.join(POSITIONS)}, got {positions!r}")
    multiple = max(num_heads, 1) * (2 if positions == "rotary" else 1)
    if dim % multiple:
        problems.append(
            f"model.dim must be a multiple of {multiple} (heads, twice that for rotary positions), got {dim}"
        )
    if not 0 <= dropout < 1:
        problems.append(f"model.dropout must be in [0, 1), got {dropout}")
    if problems:
        raise ConfigError("; ".join(problems))


@torch.no_grad()
def generate(
    model: TransformerLM,
    prompt: list[int],
    num_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 1,
    allowed: int | None = None,
) -> list[int]:
    """`num_tokens` ids that go on from `prompt`.

    The model sees at most `model.max_length` ids; when a text has grown beyond that it goes on from the later half.

    Args: temperature: logits are divided by it; 0 takes the likeliest id.
          top_k: only so many of the likeliest ids are drawn from; 0: all.
          seed: of a generator of its own, on the CPU, so that no other random number moves.
          allowed: only ids below this are drawn.
    """
    generator = torch.Generator().manual_seed(seed)
    device, was_training = next(model.parameters()).device, model.training
    ids, begin, cache = list(prompt), 0, model.new_cache()
    model.eval()
    try:
        for _ in range(num_tokens):
            if len(ids) - begin > model.max_length:
                begin, cache = len(ids) - max(model.max_length // 2, 1), model.new_cache()
            logits = model(torch.tensor([ids[begin:]], device=device), cache)[0, -1, :allowed].float().cpu()
            ids.append(draw(logits, temperature, top_k, generator))
    finally:
        model.train(was_training)
    return ids[len(prompt) :]


def draw(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """One id from logits [V]."""
    if temperature == 0:
        return int(logits.argmax())
    if 0 < top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], float("-inf"))
    return int(torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator))
