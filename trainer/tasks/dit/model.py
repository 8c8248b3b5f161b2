"""DiT, the diffusion transformer, under the parameter names and constructor names of the official release.

Owns: the network and its initialisation, so that official checkpoints load by name and a fresh model starts as theirs.
Must not know: noise schedules, losses, datasets, the Trainer.
Source: Peebles and Xie 2022, "Scalable Diffusion Models with Transformers", arXiv:2212.09748.

In the names of shapes: B images, C channels, S side of the input, L = (S / patch_size)^2 tokens, D hidden_size.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.errors import ConfigError

OFFICIAL_CFG_CHANNELS = 3  # the released samples guide the first three of four latent channels


class PatchEmbed(nn.Module):
    """Cut images [B, C, S, S] into square patches and project each: tokens [B, L, D], row by row."""

    def __init__(self, patch_size: int, in_channels: int, hidden_size: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_channels, hidden_size, kernel_size=patch_size, stride=patch_size)

    def forward(self, images: Tensor) -> Tensor:
        return self.proj(images).flatten(2).transpose(1, 2)


class TimestepEmbedder(nn.Module):
    """Timesteps [B] (fractions allowed) to vectors [B, D]: sinusoids of many periods, then a small network."""

    def __init__(self, hidden_size: int, frequency_embedding_size: int = 256, max_period: float = 10000.0) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(frequency_embedding_size, hidden_size), nn.SiLU(), nn.Linear(hidden_size, hidden_size)
        )
        self.half, self.max_period = frequency_embedding_size // 2, max_period

    def forward(self, t: Tensor) -> Tensor:
        steps = torch.arange(self.half, dtype=torch.float32, device=t.device)
        angles = t.float()[:, None] * torch.exp(-math.log(self.max_period) * steps / self.half)
        return self.mlp(torch.cat([angles.cos(), angles.sin()], dim=-1))


class LabelEmbedder(nn.Module):
    """Class labels [B] to vectors [B, D]. With dropout the table has one more row, number num_classes: "no class"."""

    def __init__(self, num_classes: int, hidden_size: int, dropout_prob: float) -> None:
        super().__init__()
        self.num_classes, self.dropout_prob = num_classes, dropout_prob
        self.embedding_table = nn.Embedding(num_classes + (dropout_prob > 0), hidden_size)

    def forward(self, labels: Tensor) -> Tensor:
        if self.training and self.dropout_prob > 0:
            dropped = torch.rand(len(labels), device=labels.device) < self.dropout_prob
            labels = labels.masked_fill(dropped, self.num_classes)
        return self.embedding_table(labels)


class Attention(nn.Module):
    """Multi-head self-attention over tokens [B, L, D]; queries, keys and values come from one projection."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = self.qkv(tokens).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two linear layers with a tanh-approximated GELU between them, applied to each token."""

    def __init__(self, hidden_size: int, mlp_ratio: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(hidden_size, int(hidden_size * mlp_ratio))
        self.fc2 = nn.Linear(self.fc1.out_features, hidden_size)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(tokens), approximate="tanh"))


def _plain_norm(tokens: Tensor) -> Tensor:
    """Layer norm without parameters: scale and shift come from the condition."""
    return F.layer_norm(tokens, tokens.shape[-1:], eps=1e-6)


def _modulated_norm(tokens: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return _plain_norm(tokens) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def _modulation(hidden_size: int, num_vectors: int) -> nn.Sequential:
    return nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, num_vectors * hidden_size))


class DiTBlock(nn.Module):
    """A transformer block whose norms and residual gates are computed from the condition [B, D] (adaLN-Zero)."""

    def __init__(self, hidden_size: int, num_heads: int, mlp_ratio: float) -> None:
        super().__init__()
        self.attn = Attention(hidden_size, num_heads)
        self.mlp = FeedForward(hidden_size, mlp_ratio)
        self.adaLN_modulation = _modulation(hidden_size, 6)

    def forward(self, tokens: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(condition).chunk(6, dim=1)
        tokens = tokens + gate1.unsqueeze(1) * self.attn(_modulated_norm(tokens, shift1, scale1))
        return tokens + gate2.unsqueeze(1) * self.mlp(_modulated_norm(tokens, shift2, scale2))


class FinalLayer(nn.Module):
    """Tokens [B, L, D] to the values of their patches [B, L, patch_size^2 * out_channels]."""

    def __init__(self, hidden_size: int, patch_size: int, out_channels: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, patch_size * patch_size * out_channels)
        self.adaLN_modulation = _modulation(hidden_size, 2)

    def forward(self, tokens: Tensor, condition: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(condition).chunk(2, dim=1)
        return self.linear(_modulated_norm(tokens, shift, scale))


class DiT(nn.Module):
    """Predicts the noise in an image, given the timestep and the class; with learn_sigma its variance as well.

    Args:
        input_size: side S of the square input (pixels or latents), a multiple of patch_size.
        input_size, in_channels, num_classes may be null in a config only where the task fills them in from its data.
        class_dropout_prob: share of labels replaced by "no class" while training; 0 makes guidance impossible.
        learn_sigma: give 2 * in_channels channels, the second half being the variance between its two bounds.
    """

    def __init__(
        self,
        input_size: int | None = 32,
        patch_size: int = 2,
        in_channels: int | None = 4,
        hidden_size: int = 1152,
        depth: int = 28,
        num_heads: int = 16,
        mlp_ratio: float = 4.0,
        class_dropout_prob: float = 0.1,
        num_classes: int | None = 1000,
        learn_sigma: bool = True,
    ) -> None:
        super().__init__()
        _check_given(input_size=input_size, in_channels=in_channels, num_classes=num_classes)
        _check_sizes(input_size, patch_size, hidden_size, num_heads, class_dropout_prob)
        self.input_size, self.patch_size, self.in_channels = input_size, patch_size, in_channels
        self.learn_sigma, self.num_classes, self.class_dropout_prob = learn_sigma, num_classes, class_dropout_prob
        self.out_channels = 2 * in_channels if learn_sigma else in_channels
        self.grid_size = input_size // patch_size
        self.x_embedder = PatchEmbed(patch_size, in_channels, hidden_size)
        self.t_embedder = TimestepEmbedder(hidden_size)
        self.y_embedder = LabelEmbedder(num_classes, hidden_size, class_dropout_prob)
        # A frozen parameter, not a buffer: official optimizer states count it as index 0.
        self.pos_embed = nn.Parameter(torch.zeros(1, self.grid_size**2, hidden_size), requires_grad=False)
        self.blocks = nn.ModuleList(DiTBlock(hidden_size, num_heads, mlp_ratio) for _ in range(depth))
        self.final_layer = FinalLayer(hidden_size, patch_size, self.out_channels)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """The official start: Xavier for linear layers, small normal embeddings, and blocks that begin as identity.

        Random numbers are drawn in the official order: the same seed gives the same weights as the official class.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        self.pos_embed.copy_(sincos_position_embedding(self.pos_embed.shape[-1], self.grid_size))
        nn.init.xavier_uniform_(self.x_embedder.proj.weight.flatten(1))  # as the linear layer that it is
        nn.init.zeros_(self.x_embedder.proj.bias)
        for embedding in (self.y_embedder.embedding_table, self.t_embedder.mlp[0], self.t_embedder.mlp[2]):
            nn.init.normal_(embedding.weight, std=0.02)
        modulations = [block.adaLN_modulation[1] for block in self.blocks]
        for layer in [*modulations, self.final_layer.adaLN_modulation[1], self.final_layer.linear]:
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def fully_sharded_modules(self) -> list[nn.Module]:
        """What ddp_backend=fully_sharded gathers and frees as one: a block at a time."""
        return list(self.blocks)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """Noisy inputs [B, C, S, S], timesteps [B], labels [B] (num_classes: "no class") to [B, out_channels, S, S]."""
        tokens = self.x_embedder(x) + self.pos_embed
        condition = self.t_embedder(t) + self.y_embedder(y)
        for block in self.blocks:
            tokens = block(tokens, condition)
        return self._join_patches(self.final_layer(tokens, condition))

    def _join_patches(self, patches: Tensor) -> Tensor:
        """Patches [B, L, patch_size^2 * out_channels] back to images [B, out_channels, S, S]."""
        grid, size = self.grid_size, self.patch_size
        patches = patches.reshape(-1, grid, grid, size, size, self.out_channels)  # rows and columns, then those inside
        return patches.permute(0, 5, 1, 3, 2, 4).reshape(-1, self.out_channels, grid * size, grid * size)

    def forward_with_cfg(
        self, x: Tensor, t: Tensor, y: Tensor, cfg_scale: float, cfg_channels: int | None = OFFICIAL_CFG_CHANNELS
    ) -> Tensor:
        """Classifier-free guidance: the second half of the batch is the first half again, under "no class" labels.

        Args:    cfg_channels: how many leading noise channels are guided; None means all. The official samples
                 guide three (of four latent channels), so that is the default; variances are never guided.
        Returns: [B, out_channels, S, S], both halves with the same guided noise.
        """
        guided = self.in_channels if cfg_channels is None else min(cfg_channels, self.in_channels)
        first = x.chunk(2)[0]
        output = self(torch.cat([first, first]), t, y)
        with_class, without = output[:, :guided].chunk(2)
        noise = without + cfg_scale * (with_class - without)
        return torch.cat([torch.cat([noise, noise]), output[:, guided:]], dim=1)


def sincos_position_embedding(hidden_size: int, grid_size: int) -> Tensor:
    """Fixed embedding of a square grid, float32 [1, grid_size^2, hidden_size]: half encodes columns, half rows."""
    quarter = hidden_size // 4
    periods = 10000.0 ** (torch.arange(quarter, dtype=torch.float64, device="cpu") / quarter)
    angles = torch.arange(grid_size, dtype=torch.float64, device="cpu")[:, None] / periods
    line = torch.cat([angles.sin(), angles.cos()], dim=1)
    columns, rows = line.repeat(grid_size, 1), line.repeat_interleave(grid_size, dim=0)
    return torch.cat([columns, rows], dim=1).float().unsqueeze(0)


def _check_given(**sizes: int | None) -> None:
    missing = [name for name, size in sizes.items() if size is None]
    if missing:
        raise ConfigError(
            f"{', '.join(f'model.{name}' for name in missing)}: null, and no task knows it from its data."
        )


def _check_sizes(input_size: int, patch_size: int, hidden_size: int, num_heads: int, dropout: float) -> None:
    problems = []
    if patch_size < 1 or input_size < patch_size or input_size % patch_size:
        problems.append(f"model.input_size={input_size} is not a multiple of model.patch_size={patch_size}")
    if hidden_size < 4 or hidden_size % 4:
        problems.append(f"model.hidden_size={hidden_size} must be a multiple of 4 (sine and cosine, rows and columns)")
    if num_heads < 1 or hidden_size % num_heads:
        problems.append(f"model.hidden_size={hidden_size} is not a multiple of model.num_heads={num_heads}")
    if not 0 <= dropout < 1:
        problems.append(f"model.class_dropout_prob={dropout} must be at least 0 and below 1")
    if problems:
        raise ConfigError("; ".join(problems) + ".")
