"""A decoder under the parameter names of fairseq's transformer_lm, so that a run of fairseq goes on here.

Norms after each branch, ReLU, sinusoidal positions that begin behind the padding index, the output tied to the embedding.
Copy it, or write the model that you have: any nn.Module with the same names does.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x):
        q, k, v = (project(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj))
        return self.out_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    def __init__(self, dim: int, hidden: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.self_attn = Attention(dim, num_heads)
        self.self_attn_layer_norm = nn.LayerNorm(dim)
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.final_layer_norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        x = self.self_attn_layer_norm(x + self.dropout(self.self_attn(x)))
        return self.final_layer_norm(x + self.dropout(self.fc2(F.relu(self.fc1(x)))))


class FairseqLM(nn.Module):
    """Token ids int64 [B, T] to logits [B, T, vocab_size]."""

    def __init__(self, vocab_size: int, dim: int, hidden: int, num_layers: int, num_heads: int, dropout: float = 0.1, padding: int = 1):
        super().__init__()
        self.decoder = nn.Module()
        self.decoder.embed_tokens = nn.Embedding(vocab_size, dim)
        self.decoder.layers = nn.ModuleList(Layer(dim, hidden, num_heads, dropout) for _ in range(num_layers))
        self.decoder.output_projection = nn.Linear(dim, vocab_size, bias=False)
        self.decoder.output_projection.weight = self.decoder.embed_tokens.weight
        nn.init.normal_(self.decoder.embed_tokens.weight, std=dim**-0.5)
        self.dim, self.padding, self.dropout = dim, padding, nn.Dropout(dropout)

    def forward(self, tokens):
        x = math.sqrt(self.dim) * self.decoder.embed_tokens(tokens) + self.positions(tokens.shape[1], tokens.device)
        x = self.dropout(x)
        for layer in self.decoder.layers:
            x = layer(x)
        return self.decoder.output_projection(x)

    def positions(self, length: int, device) -> torch.Tensor:
        half = self.dim // 2
        rates = torch.exp(torch.arange(half, device=device) * -(math.log(10000) / (half - 1)))
        angles = (torch.arange(length, device=device) + self.padding + 1)[:, None] * rates
        return torch.cat([angles.sin(), angles.cos()], dim=1)
