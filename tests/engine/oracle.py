"""Inkling and its MTP modules recomputed from scratch: no cache, no batch, no import of the engine.

    oracle = Oracle(folder)                                   # raw layout, raw or transformers spelling
    hidden, logits = oracle.target_hidden_and_logits(ids)     # [T, hidden] after the final norm, [T, vocab]
    chain = oracle.mtp_chain(ids, num_modules)                # one (hidden, logits) a module

mtp_chain(ids, N)[m] holds rows p = 0 .. T - m - 2: those whose token ids[p + m + 1] exists. Row p of module m takes
the embedding of ids[p + m + 1] and the previous hidden of row p (the target's for module 0); its logits predict the
token at p + m + 2. So with ids = committed tokens followed by the drafts of one pass, the pass's row
P = len(committed) - 2 must equal row P of every module, and draft m = argmax of mtp_chain(ids, N)[m][1][P].

    oracle.hear(prompt_ids, {position: bins})                 # what placeholders of this prompt stand for

Every sequence that begins like the prompt, as far as it goes, then has these features in place of its tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

Tensor = torch.Tensor


class Oracle:
    """A checkpoint in fp32, one sequence at a time."""

    def __init__(self, folder: Path) -> None:
        raw = json.loads((folder / "config.json").read_text())
        self.text: dict[str, Any] = raw["text_config"]
        self.mtp: dict[str, Any] = raw["mtp_config"]
        self.keys_values: dict[str, Tensor] = {}
        self.weights: dict[str, Tensor] = {}
        for file in folder.glob("*.safetensors"):
            self.weights |= {name: tensor.float() for name, tensor in load_file(file).items()}
        self._heard: list[tuple[list[int], dict[int, Tensor]]] = []

    def hear(self, prompt_ids: list[int], bins: dict[int, Tensor]) -> None:
        """Position -> bins [80] of one token."""
        features = {}
        for position, of_token in bins.items():
            rows = [16 * band + int(of_band) for band, of_band in enumerate(of_token)]
            summed = self.weights["model.audio.encoder.weight"][rows].sum(0)
            features[position] = self._norm(summed, "model.audio.final_norm.weight")
        self._heard.append((prompt_ids, features))

    def target_hidden_and_logits(self, token_ids: list[int]) -> tuple[Tensor, Tensor]:
        """All rows of the target: hidden after the final norm [T, hidden], logits [T, vocab]."""
        x = self._embed(token_ids, self._features(token_ids))
        for layer in range(self.text["num_hidden_layers"]):
            is_local = layer in self.text["local_layer_ids"]
            x = self._block(x, f"model.llm.layers.{layer}.", is_local, has_log_scaling=not is_local)
        hidden = self._norm(x, "model.llm.norm.weight")
        return hidden, self._logits(hidden)

    def mtp_chain(self, token_ids: list[int], num_modules: int) -> list[tuple[Tensor, Tensor]]:
        """Per module m: hidden [T - m - 1, hidden] and logits [T - m - 1, vocab] of every row that has its token."""
        hidden, _ = self.target_hidden_and_logits(token_ids)
        chain = []
        for module in range(num_modules):
            following = self._embed(token_ids, self._features(token_ids))[module + 1 :]
            hidden = self._module(module, following, hidden[: len(token_ids) - module - 1])
            chain.append((hidden, self._logits(hidden)))
        return chain

    def single_module_drafts(self, token_ids: list[int], num_drafts: int) -> list[Tensor]:
        """Logits [vocab] of each draft behind the committed `token_ids`, module 0 run again from scratch for each.

        Rows 0 .. len - 2 take the target's hidden, later ones the module's own output at the row before.
        """
        hidden, _ = self.target_hidden_and_logits(token_ids)
        hidden, following = hidden[:-1], self._embed(token_ids, self._features(token_ids))[1:]
        drafts = []
        for _ in range(num_drafts):
            output = self._module(0, following, hidden)
            drafts.append(self._logits(output)[-1])
            following = torch.cat((following, self._embed([int(drafts[-1].argmax())])))
            hidden = torch.cat((hidden, output[-1:]))
        return drafts

    def _module(self, module: int, embeds: Tensor, hidden: Tensor) -> Tensor:
        """One module over all rows: embeddings and previous hiddens, [T, hidden] each -> [T, hidden]."""
        prefix = f"model.mtp.layers.{module}."
        previous = self._norm(hidden, prefix + "hidden_norm.weight")
        token = self._norm(embeds, prefix + "embed_norm.weight")
        x = torch.cat((previous, token), 1) @ self.weights[prefix + "input_proj.weight"].T
        is_local = module in self.mtp["local_layer_ids"]
        hidden = self._block(x, prefix + "transformer_block.", is_local, has_log_scaling=False)
        return self._norm(hidden, "model.mtp.chain_norm.weight") if self.mtp["chain_hidden_post_norm"] else hidden

    def _features(self, token_ids: list[int]) -> dict[int, Tensor]:
        for prompt_ids, features in self._heard:
            if all(a == b for a, b in zip(prompt_ids, token_ids, strict=False)):
                return features
        return {}

    def _embed(self, token_ids: list[int], features: dict[int, Tensor] | None = None) -> Tensor:
        embeds = self._norm(self.weights["model.llm.embed.weight"][token_ids], "model.llm.embed_norm.weight")
        for position, feature in (features or {}).items():
            if position < len(token_ids):
                embeds[position] = feature
        return embeds

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = hidden / self.text["logits_mup_width_multiplier"] @ self.weights["model.llm.unembed.weight"].T
        return logits[:, : self.text["unpadded_vocab_size"]]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.text["rms_norm_eps"]).rsqrt() * self.weights[name]

    def _block(self, x: Tensor, prefix: str, is_local: bool, has_log_scaling: bool) -> Tensor:
        attended = self._attention(
            self._norm(x, prefix + "attn_norm.weight"), prefix + "attn.", is_local, has_log_scaling
        )
        x = x + self._conv(attended, prefix + "attn_sconv.weight")
        y = self._norm(x, prefix + "mlp_norm.weight")
        is_sparse = prefix + "mlp.gate.weight" in self.weights
        y = self._experts(y, prefix + "mlp.") if is_sparse else self._dense(y, prefix + "mlp.")
        return x + self._conv(y, prefix + "mlp_sconv.weight")

    def _conv(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[name].squeeze(1)  # [channels, kernel], last tap is the row itself
        kernel = weight.shape[1]
        padded = torch.cat((x.new_zeros(kernel - 1, x.shape[1]), x))
        return x + sum(padded[tap : tap + len(x)] * weight[:, tap] for tap in range(kernel))

    def _attention(self, x: Tensor, prefix: str, is_local: bool, has_log_scaling: bool) -> Tensor:
        swa = "swa_" if is_local else ""
        num_rows, d = len(x), self.text[swa + "head_dim"]
        project = {name: x @ self.weights[f"{prefix}w{name}.weight"].T for name in ("q_du", "k_dv", "v_dv", "r_du")}
        q = self._norm(project["q_du"].view(num_rows, -1, d), prefix + "q_norm.weight")
        k = self._conv(project["k_dv"], prefix + "k_sconv.weight").view(num_rows, -1, d)
        k = self._norm(k, prefix + "k_norm.weight")
        v = self._conv(project["v_dv"], prefix + "v_sconv.weight").view(num_rows, -1, d)
        #: What a cache should hold after this: prefix of the attention's tensors -> [rows, 2, kv_heads, head_dim]
        self.keys_values[prefix] = torch.stack((k, v), 1)
        heads, group = q.shape[1], q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("ihd,jhd->hij", q, k) / d
        profiles = self.weights[prefix + "rel_logits_proj.proj"]  # [d_rel, extent]
        by_distance = torch.einsum("ihr,re->hie", project["r_du"].view(num_rows, heads, -1), profiles)
        distance = torch.arange(num_rows)[:, None] - torch.arange(num_rows)
        has_bias = (distance >= 0) & (distance < profiles.shape[1])
        index = distance.clamp(0, profiles.shape[1] - 1).expand(heads, -1, -1)
        scores = scores + by_distance.gather(2, index) * has_bias
        floor = self.text["log_scaling_n_floor"]
        if has_log_scaling and floor is not None:
            excess = ((torch.arange(num_rows) + 1) / floor).clamp(min=1.0).log()
            scores = scores * (1 + self.text["log_scaling_alpha"] * excess)[:, None]
        is_visible = distance >= 0
        if is_local:
            is_visible &= distance < self.text["sliding_window_size"]
        weights = scores.masked_fill(~is_visible, float("-inf")).softmax(-1)
        output = torch.einsum("hij,jhd->ihd", weights, v).reshape(num_rows, -1)
        return output @ self.weights[prefix + "wo_ud.weight"].T

    def _swiglu(self, x: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        gate, up = (x @ w13.T).unflatten(-1, (-1, 2)).unbind(-1)  # rows are gate, up, gate, up
        return torch.nn.functional.silu(gate) * up @ w2.T

    def _dense(self, x: Tensor, prefix: str) -> Tensor:
        output = self._swiglu(x, self.weights[prefix + "w13_dn.weight"], self.weights[prefix + "w2_md.weight"])
        return output * self.weights[prefix + "global_scale"]

    def _experts(self, x: Tensor, prefix: str) -> Tensor:
        num_routed = self.text["n_routed_experts"]
        logits = x @ self.weights[prefix + "gate.weight"].T
        choice = logits[:, :num_routed].sigmoid() + self.weights[prefix + "gate.bias"]
        scale = self.text["route_scale"] * self.weights[prefix + "gate.global_scale"]
        rows = []
        for row, row_logits, row_choice in zip(x, logits, choice, strict=True):
            routed = row_choice.topk(self.text["num_experts_per_tok"]).indices.tolist()
            active = routed + list(range(num_routed, len(row_logits)))
            gates = row_logits[active].sigmoid()
            gates = gates / gates.sum() * scale
            rows.append(sum(g * self._expert(row, prefix, e) for g, e in zip(gates, active, strict=True)))
        return torch.stack(rows)

    def _expert(self, row: Tensor, prefix: str, expert: int) -> Tensor:
        num_routed = self.text["n_routed_experts"]
        name, index = ("experts.", expert) if expert < num_routed else ("shared_experts.shared_", expert - num_routed)
        return self._swiglu(
            row, self.weights[f"{prefix}{name}w13_weight"][index], self.weights[f"{prefix}{name}w2_weight"][index]
        )
