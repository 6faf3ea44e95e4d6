"""Inkling's text architecture and its MTP modules in plain torch, for training and for exact evaluation.

Module and parameter names are the raw checkpoint's, so `state_dict()` is the checkpoint. Whole sequences only: there
is no cache. Several documents may share a row; `Layout` keeps them blind to each other.

Shape letters: B rows, T slots, H hidden, h heads, g key-value heads, d head size, E bias extent, W window, C chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Called with a stream's name and its short convolution's input [B, T, channels]; returns what the convolution sees.
StreamFilter = Callable[[str, Tensor], Tensor]


@dataclass(frozen=True)
class NanoConfig:
    """Sizes of inkling-nano; see `export.py` for the raw config they become."""

    vocab_size: int = 2048
    hidden_size: int = 192
    num_layers: int = 6
    num_heads: int = 6
    head_dim: int = 32
    num_kv_heads: int = 2
    local_num_kv_heads: int = 3
    window: int = 32
    local_layers: tuple[int, ...] = (0, 1, 3, 4)
    num_dense_layers: int = 2
    d_rel: int = 8
    rel_extent: int = 256
    conv_kernel: int = 4
    dense_width: int = 288
    expert_width: int = 48
    num_experts: int = 8
    num_active_experts: int = 2
    num_shared_experts: int = 2
    route_scale: float = 2.0
    logits_divisor: float = 2.0
    norm_eps: float = 1e-6
    audio_bands: int = 80
    audio_levels: int = 16
    # The placeholder token whose embedding is the audio tower's.
    audio_token: int = 14
    num_mtp_layers: int = 8
    mtp_local_layers: tuple[int, ...] = (0, 2, 4, 5, 6, 7)
    # Spread of the log-normal draw of norm weights: wide where a forgotten or doubled norm must show.
    shared_norm_sigma: float = 0.7
    mtp_norm_sigma: float = 0.4


class Layout(NamedTuple):
    """Which slots of a row see which; made once a batch."""

    # [3, B, T, 1] fp32: 1 where the slot 1, 2, 3 before belongs to the same document
    taps: Tensor
    # [B, 1, T, T] bool: causal, same document
    causal: Tensor
    # [B, 1, C, W, 2W] bool: as `causal` within the window, for chunk c's queries over chunks c-1 and c
    banded: Tensor


def make_layout(documents: Tensor, window: int) -> Layout:
    """`documents` [B, T] int: number of each slot's document; T is a multiple of `window`."""
    rows, length = documents.shape
    taps = torch.stack([
        F.pad(documents[:, s:] == documents[:, :-s], (s, 0), value=False).float() for s in (1, 2, 3)
    ]).unsqueeze(-1)  # fmt: skip
    positions = torch.arange(length, device=documents.device)
    causal = (documents[:, :, None] == documents[:, None, :]) & (positions[:, None] >= positions[None, :])
    queries = documents.view(rows, -1, window)
    keys = torch.cat([F.pad(queries, (0, 0, 1, 0), value=-1)[:, :-1], queries], dim=-1)
    place = torch.arange(2 * window, device=documents.device)
    distance = place[:window, None] + window - place[None, :]
    near = (distance >= 0) & (distance < window)
    banded = (queries[..., :, None] == keys[..., None, :]) & near
    return Layout(taps, causal[:, None], banded[:, None])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalizes the last dimension in fp32 and keeps fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


class Weight(nn.Module):
    """A bare weight under the name `<module>.weight`; used in the dtype of its input."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape))

    def linear(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class ShortConv(Weight):
    """Depthwise causal convolution of four taps plus identity; weight [channels, 1, 4], last the slot's own tap."""

    def forward(self, u: Tensor, taps: Tensor) -> Tensor:
        """`u` [B, T, channels]; returns the same shape and dtype, computed in fp32."""
        wide = u.float()
        out = wide * (1.0 + self.weight[:, 0, 3])
        for shift in (1, 2, 3):
            earlier = F.pad(wide, (0, 0, shift, 0))[:, : wide.shape[1]]
            out = out + earlier * taps[shift - 1] * self.weight[:, 0, 3 - shift]
        return out.to(u.dtype)


class RelativeBias(nn.Module):
    """Bank of bias-by-distance profiles, `proj` [d_rel, E]."""

    def __init__(self, d_rel: int, extent: int) -> None:
        super().__init__()
        self.proj = nn.Parameter(torch.empty(d_rel, extent))


def skew_full(bias: Tensor, length: int) -> Tensor:
    """`bias` [..., T, E], last index from the farthest distance E-1 to 0 -> [..., T, T] by query and key.

    Entries past the extent are zero; entries of later keys are left over and must be masked.
    """
    extent = bias.shape[-1]
    bias = bias[..., extent - length :] if extent > length else F.pad(bias, (length - extent, 0))
    shifted = F.pad(bias, (1, 0)).reshape(*bias.shape[:-2], length + 1, length)
    return shifted[..., 1:, :]


def skew_banded(bias: Tensor, window: int) -> Tensor:
    """`bias` [..., W, W], last index from distance W-1 to 0 -> [..., W, 2W] over the previous and the own chunk."""
    padded = F.pad(bias, (1, window)).flatten(-2)
    return padded[..., : 2 * window * window].reshape(*bias.shape[:-1], 2 * window)


def attend(scores: Tensor, bias: Tensor, keep: Tensor, values: Tensor) -> Tensor:
    """Softmax in fp32 over kept keys, then the weighted values."""
    logits = (scores.float() + bias.float()).masked_fill(~keep, -math.inf)
    return logits.softmax(-1).to(values.dtype) @ values


class Attention(nn.Module):
    """Grouped-query attention with a learned relative bias and convolved keys and values."""

    def __init__(self, config: NanoConfig, is_local: bool) -> None:
        super().__init__()
        self.config, self.is_local = config, is_local
        self.kv_heads = config.local_num_kv_heads if is_local else config.num_kv_heads
        hidden, size = config.hidden_size, config.head_dim
        self.wq_du = Weight(config.num_heads * size, hidden)
        self.wk_dv = Weight(self.kv_heads * size, hidden)
        self.wv_dv = Weight(self.kv_heads * size, hidden)
        self.wr_du = Weight(config.num_heads * config.d_rel, hidden)
        self.wo_ud = Weight(hidden, config.num_heads * size)
        self.q_norm, self.k_norm = Weight(size), Weight(size)
        self.k_sconv = ShortConv(self.kv_heads * size, 1, config.conv_kernel)
        self.v_sconv = ShortConv(self.kv_heads * size, 1, config.conv_kernel)
        self.rel_logits_proj = RelativeBias(config.d_rel, config.window if is_local else config.rel_extent)

    def heads(self, x: Tensor, count: int) -> Tensor:
        """[B, T, count * size] -> [B, count, T, size]."""
        return x.unflatten(-1, (count, -1)).transpose(1, 2)

    def forward(self, y: Tensor, layout: Layout, stream: StreamFilter, ignore_window: bool = False) -> Tensor:
        """`y` [B, T, H] -> [B, T, H], before the output's own convolution."""
        config, heads = self.config, self.config.num_heads
        keys = self.k_sconv(stream("k", self.wk_dv.linear(y)), layout.taps)
        values = self.v_sconv(stream("v", self.wv_dv.linear(y)), layout.taps)
        q = rms_norm(self.heads(self.wq_du.linear(y), heads), self.q_norm.weight, config.norm_eps)
        k = rms_norm(self.heads(keys, self.kv_heads), self.k_norm.weight, config.norm_eps).to(y.dtype)
        # Inkling's score scale is 1/d, not 1/sqrt(d).
        q = (q / config.head_dim).to(y.dtype)
        v = self.heads(values, self.kv_heads)
        k, v = (x.repeat_interleave(heads // self.kv_heads, dim=1) for x in (k, v))
        profiles = self.rel_logits_proj.proj.flip(-1).to(y.dtype)
        bias = self.heads(self.wr_du.linear(y), heads) @ profiles
        if self.is_local and not ignore_window:
            out = self._banded(q, k, v, bias, layout.banded)
        else:
            out = attend(q @ k.transpose(-1, -2), skew_full(bias, y.shape[1]), layout.causal, v)
        return self.wo_ud.linear(out.transpose(1, 2).flatten(-2))

    def _banded(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, keep: Tensor) -> Tensor:
        """Windowed attention in chunks of one window: queries of chunk c see chunks c-1 and c."""
        window = self.config.window
        q, k, v, bias = (x.unflatten(2, (-1, window)) for x in (q, k, v, bias))
        k, v = (torch.cat([F.pad(x, (0, 0, 0, 0, 1, 0))[:, :, :-1], x], dim=3) for x in (k, v))
        return attend(q @ k.transpose(-1, -2), skew_banded(bias, window), keep, v).flatten(2, 3)


def gated(rows: Tensor) -> Tensor:
    """[..., 2 * width] with gate and up rows interleaved (gate first) -> [..., width]."""
    pairs = rows.unflatten(-1, (-1, 2))
    return F.silu(pairs[..., 0]) * pairs[..., 1]


class DenseMlp(nn.Module):
    """Gated MLP with one scale on its output."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.w13_dn = Weight(2 * config.dense_width, config.hidden_size)
        self.w2_md = Weight(config.hidden_size, config.dense_width)
        self.global_scale = nn.Parameter(torch.empty(1))

    def forward(self, y: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """`y` [B, T, H] fp32 -> [B, T, H] in `dtype`."""
        return self.w2_md.linear(gated(self.w13_dn.linear(y.to(dtype)))) * self.global_scale.to(dtype), None


class Gate(nn.Module):
    """Router: logits of the routed experts first, then of the shared ones."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts + config.num_shared_experts, config.hidden_size))
        self.bias = nn.Parameter(torch.empty(config.num_experts), requires_grad=False)
        self.global_scale = nn.Parameter(torch.empty(1))

    def forward(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """`y` [B, T, H] fp32 -> weights [B, T, routed + shared] (zero where not active), load [routed]."""
        config = self.config
        scores = torch.sigmoid(F.linear(y, self.weight))
        routed = scores[..., : config.num_experts]
        # The bias chooses but does not weigh.
        chosen = torch.topk(routed.detach() + self.bias, config.num_active_experts, dim=-1).indices
        active = torch.zeros_like(routed).scatter(-1, chosen, 1.0)
        load = active.mean((0, 1))
        scores = torch.cat([routed * active, scores[..., config.num_experts :]], dim=-1)
        scale = config.route_scale * self.global_scale
        return scores / scores.sum(-1, keepdim=True) * scale, load


class Experts(nn.Module):
    """Weights of the routed experts."""

    def __init__(self, count: int, hidden: int, width: int) -> None:
        super().__init__()
        self.w13_weight = nn.Parameter(torch.empty(count, 2 * width, hidden))
        self.w2_weight = nn.Parameter(torch.empty(count, hidden, width))


class SharedExperts(nn.Module):
    """Weights of the experts that every token uses."""

    def __init__(self, count: int, hidden: int, width: int) -> None:
        super().__init__()
        self.shared_w13_weight = nn.Parameter(torch.empty(count, 2 * width, hidden))
        self.shared_w2_weight = nn.Parameter(torch.empty(count, hidden, width))


class MoeMlp(nn.Module):
    """Experts evaluated densely as one wide gated MLP; a token's weight is zero on experts it does not use."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.expert_width
        self.gate = Gate(config)
        self.experts = Experts(config.num_experts, hidden, width)
        self.shared_experts = SharedExperts(config.num_shared_experts, hidden, width)

    def forward(self, y: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """`y` [B, T, H] fp32, as the router needs it -> [B, T, H] in `dtype`, load [routed]."""
        weights, load = self.gate(y)
        w13 = torch.cat([self.experts.w13_weight, self.shared_experts.shared_w13_weight]).flatten(0, 1)
        w2 = torch.cat([self.experts.w2_weight, self.shared_experts.shared_w2_weight]).transpose(0, 1).flatten(1)
        inner = gated(F.linear(y.to(dtype), w13.to(dtype))).unflatten(-1, (weights.shape[-1], -1))
        inner = inner * weights[..., None].to(dtype)
        return F.linear(inner.flatten(-2), w2.to(dtype)), load


def keep_stream(name: str, u: Tensor) -> Tensor:
    """The stream filter that changes nothing."""
    return u


class Block(nn.Module):
    """One decoder layer; the residual stream is fp32, products run in `compute_dtype`."""

    def __init__(self, config: NanoConfig, is_local: bool, is_dense: bool) -> None:
        super().__init__()
        self.eps, self.is_dense = config.norm_eps, is_dense
        self.compute_dtype = torch.float32
        self.attn_norm, self.mlp_norm = Weight(config.hidden_size), Weight(config.hidden_size)
        self.attn = Attention(config, is_local)
        self.attn_sconv = ShortConv(config.hidden_size, 1, config.conv_kernel)
        self.mlp = DenseMlp(config) if is_dense else MoeMlp(config)
        self.mlp_sconv = ShortConv(config.hidden_size, 1, config.conv_kernel)

    def forward(
        self, x: Tensor, layout: Layout, stream: StreamFilter = keep_stream, ignore_window: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """`x` [B, T, H] fp32 -> the same, and the routed experts' load [experts] in a mixture layer."""
        y = rms_norm(x, self.attn_norm.weight, self.eps).to(self.compute_dtype)
        x = x + self.attn_sconv(stream("attn", self.attn(y, layout, stream, ignore_window)), layout.taps)
        y = rms_norm(x, self.mlp_norm.weight, self.eps)
        out, load = self.mlp(y, self.compute_dtype)
        return x + self.mlp_sconv(stream("mlp", out), layout.taps), load


class MtpModule(nn.Module):
    """One MTP depth: joins a hidden row and a later token's embedding and runs one dense layer."""

    def __init__(self, config: NanoConfig, is_local: bool) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.compute_dtype = torch.float32
        self.embed_norm, self.hidden_norm = Weight(config.hidden_size), Weight(config.hidden_size)
        self.input_proj = Weight(config.hidden_size, 2 * config.hidden_size)
        self.transformer_block = Block(config, is_local, is_dense=True)

    def join(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """`hidden`, `embedded` [B, T, H] -> the layer's input [B, T, H] fp32; hidden comes first."""
        both = [
            rms_norm(hidden, self.hidden_norm.weight, self.eps),
            rms_norm(embedded, self.embed_norm.weight, self.eps),
        ]
        return self.input_proj.linear(torch.cat(both, dim=-1).to(self.compute_dtype)).float()


class Backbone(nn.Module):
    """Embedding, decoder layers, final norm and output matrix."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.embed = Weight(config.vocab_size, config.hidden_size)
        self.embed_norm, self.norm = Weight(config.hidden_size), Weight(config.hidden_size)
        self.layers = nn.ModuleList(
            Block(config, index in config.local_layers, index < config.num_dense_layers)
            for index in range(config.num_layers)
        )
        self.unembed = Weight(config.vocab_size, config.hidden_size)


class MtpHead(nn.Module):
    """The MTP modules, one a depth."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            MtpModule(config, depth in config.mtp_local_layers) for depth in range(config.num_mtp_layers)
        )


class AudioTower(nn.Module):
    """One row a frame: the norm of the sum of a table's rows, one row a mel band, chosen by the band's level."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.levels, self.eps = config.audio_levels, config.norm_eps
        self.compute_dtype = torch.float32
        self.encoder = Weight(config.audio_bands * config.audio_levels, config.hidden_size)
        self.final_norm = Weight(config.hidden_size)

    def forward(self, bins: Tensor) -> Tensor:
        """`bins` [B, T, bands] uint8 levels -> [B, T, H] fp32; the sum is one product with the one-hot levels."""
        chosen = (bins[..., None] == torch.arange(self.levels, device=bins.device)).to(self.compute_dtype).flatten(-2)
        return rms_norm(chosen @ self.encoder.weight.to(chosen.dtype), self.final_norm.weight, self.eps)


class Parts(nn.Module):
    """The `model.` level of the raw names."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.llm, self.mtp, self.audio = Backbone(config), MtpHead(config), AudioTower(config)


class Lookup(torch.autograd.Function):
    """Embedding lookup whose gradient is one product with the one-hot matrix.

    Torch's own gradient sorts the tokens; a few tokens here are so frequent that this is slow.
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, tokens: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.num_rows = table.shape[0]
        return table[tokens]

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[None, Tensor]:
        (tokens,) = ctx.saved_tensors
        flat = gradient.flatten(0, -2)
        rows = torch.arange(ctx.num_rows, device=tokens.device)
        return None, (rows[:, None] == tokens.flatten()[None, :]).to(flat.dtype) @ flat


class NanoModel(nn.Module):
    """The whole model."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Parts(config)

    @property
    def llm(self) -> Backbone:
        return self.model.llm

    @property
    def mtp(self) -> nn.ModuleList:
        return self.model.mtp.layers

    def set_compute_dtype(self, dtype: torch.dtype) -> None:
        """Precision of matrix products; the residual stream and norms stay fp32."""
        for module in self.modules():
            if isinstance(module, (Block, MtpModule, AudioTower)):
                module.compute_dtype = dtype

    def hear(self, bins: Tensor) -> Tensor:
        """`bins` [B, T, bands] uint8 -> what stands at audio placeholders, [B, T, H]."""
        return self.model.audio(bins)

    def embed(self, tokens: Tensor, heard: Tensor | None = None) -> Tensor:
        """[B, T] -> normed embeddings [B, T, H]; at audio placeholders the rows of `heard` [B, T, H] as they are."""
        table, norm = self.llm.embed.weight, self.llm.embed_norm.weight
        embedded = rms_norm(Lookup.apply(tokens, table), norm, self.config.norm_eps)
        if heard is None:
            return embedded
        return torch.where((tokens == self.config.audio_token)[..., None], heard, embedded)

    def layers_forward(self, embedded: Tensor, layout: Layout) -> tuple[Tensor, list[Tensor]]:
        """Runs the decoder layers: `embedded` [B, T, H] -> the residual stream before the final norm, expert loads."""
        x, loads = embedded, []
        for layer in self.llm.layers:
            x, load = layer(x, layout)
            if load is not None:
                loads.append(load)
        return x, loads

    def final_norm(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.llm.norm.weight, self.config.norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., vocab] fp32; `hidden` is the final norm's output, or an MTP module's, which has no norm."""
        return F.linear(hidden / self.config.logits_divisor, self.llm.unembed.weight)


def audio_table(config: NanoConfig, generator: torch.Generator) -> Tensor:
    """[bands * levels, H]: a direction a band, times the level above silence, and a little of a direction a level.

    Neighbouring levels start alike, so that what is learnt of one level holds for the next.
    """
    bands = torch.randn(config.audio_bands, 1, config.hidden_size, generator=generator)
    levels = (torch.arange(config.audio_levels) - 2.0)[:, None] / 4.0
    own = torch.randn(config.audio_bands, config.audio_levels, config.hidden_size, generator=generator)
    return ((bands * levels + 0.2 * own) / config.audio_bands**0.5).flatten(0, 1)


@torch.no_grad()
def initialize(model: NanoModel, generator: torch.Generator) -> None:
    """Draws all weights on the CPU. Outputs of attention and MLP start small; norms as the config's spreads say."""
    config = model.config
    for name, parameter in model.named_parameters():
        leaf = name.removesuffix(".weight").rsplit(".", 1)[-1]
        noise = torch.randn(parameter.shape, generator=generator)
        if leaf in ("q_norm", "k_norm"):
            # Scores are scaled by 1/d; with weights of one, attention would start almost flat.
            parameter.fill_(math.sqrt(2.0 * math.sqrt(config.head_dim)))
        elif name in ("model.llm.embed_norm.weight", "model.llm.norm.weight"):
            parameter.copy_(torch.exp(config.shared_norm_sigma * noise))
        elif leaf in ("embed_norm", "hidden_norm", "final_norm"):
            parameter.copy_(torch.exp(config.mtp_norm_sigma * noise))
        elif leaf in ("attn_norm", "mlp_norm", "global_scale"):
            parameter.fill_(1.0)
        elif leaf == "encoder":
            parameter.copy_(audio_table(config, generator))
        elif leaf == "bias":
            parameter.zero_()
        elif leaf.endswith("sconv"):
            parameter.copy_(0.02 * noise)
        elif leaf == "proj":
            parameter.copy_(0.05 * noise)
        elif leaf == "embed":
            parameter.copy_(noise)
        else:
            scale = {"wo_ud": 0.25, "w2_md": 0.25, "w2_weight": 0.25, "shared_w2_weight": 0.25, "unembed": 0.5}
            parameter.copy_(noise * scale.get(leaf, 1.0) / math.sqrt(parameter.shape[-1]))
