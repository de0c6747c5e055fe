"""The network: a Llama-like decoder in which every value-residual variant is a value of one setting, `value_mode`.

    python model.py --value_mode=svformer --n_layer=4      print a mode's plan: which layer owns and reads what, sizes
    python model.py table                                  all modes: equation, source, parameters, KV cache

Shapes: B batch, T tokens, C n_embd, H n_head, G n_kv_head, D head_dim, V vocab_size. Layers are counted from 0, so
the paper's V_1 is projected[0]["v"]. A_n is layer n's causal softmax(q k^T / sqrt(D)); U_n is the output of its
attention before the output projection. Modes as data, and the table of them, are in value_modes.py.
Paper: https://arxiv.org/abs/2410.17897.

The idea is in Attention.forward. Before it: the weights of residuals. After it: Block, GPT, the KV cache. The rest of
a Llama (rotary positions, attention kernels, MLP) is in net/layers.py, the loss in net/loss.py. Read next: train.py.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from configurator import need, run
from net.layers import (
    MLP,
    DepthAverage,
    Linear,
    Rope,
    apply_rope,
    attend,
    attend_across,
    new_norm,
    normal,
    repeat_heads,
    residual_proj_std,
    to_fp32,
)
from net.loss import chunked_cross_entropy
from value_modes import plan_layers, stored_tensors


def weighted_sum(weights, here, sources):
    """w_self * here + w_1 * source_1 + …. Weights are numbers, learned scalars, or tensors that broadcast."""
    w_self, *source_weights = weights
    is_one = isinstance(w_self, float) and w_self == 1  # saves a product
    total = here if is_one else w_self * here
    for weight, source in zip(source_weights, sources, strict=True):
        is_zero = isinstance(weight, float) and weight == 0  # the mode `scaled` has no V_1
        if not is_zero:
            total = total + weight * source.to(here.dtype)  # under autocast embeddings are fp32
    return total.to(here.dtype)  # which scalars leave alone, but under autocast a vector of weights makes it fp32


def join_scores(q, k, weights, others):
    """(q, k) of wider heads, whose product is a mix of scores: w_self q k^T + sum_i w_i q_i k_i^T.
    others: {"q": q_i, "k": k_i} of each layer i."""
    w_self, *other_weights = weights
    q_others = [w * other["q"] for w, other in zip(other_weights, others, strict=True)]
    k_others = [other["k"] for other in others]
    return torch.cat([w_self * q, *q_others], dim=-1).to(q.dtype), torch.cat([k, *k_others], dim=-1)


class MixingWeights(nn.Module):
    """The weights of one residual in all layers: forward() -> {layer: (w_self, one for each source)}.

    starts: the same dict, of fixed weights or of what learned ones start from; those of learn="softmax" start as below.
    It is empty where a Gate computes the weights, or map="cross" needs none. Learned ones are vectors, even if of
    length 1, because FSDP2 takes no scalars. So AdamW does not decay them (train.adamw).
    """

    def __init__(self, residual, index, plan):
        super().__init__()
        # how many sources the residual has in each layer that has it
        counts = {n: len(m.sources) for n, layer in enumerate(plan) for m in layer.mixes if m.index == index}
        needs_no_weights = residual.is_gated or residual.map == "cross"
        self.starts = {} if needs_no_weights else {n: residual.starts(count) for n, count in counts.items()}
        self.learn = "fixed" if needs_no_weights else residual.learn
        # the parameters; what they mean is in forward
        starts, n_mixed = list(self.starts.values()), len(self.starts)  # n_mixed: layers that have the residual
        if self.learn in ("scalar", "unit"):
            self.scalars = nn.ParameterList(torch.tensor(start) for start in starts)
        if self.learn == "sources":  # w_self is not learned
            self.scalars = nn.ParameterList(torch.tensor(start[1:]) for start in starts)
        if self.learn == "unit":
            self.scale = nn.Parameter(torch.ones(n_mixed))
        if self.learn == "lerp":
            self.share = nn.Parameter(torch.tensor([source for _, source in starts]))
        if self.learn == "softmax":  # Learnable-Plus: all layers share logits and scale
            self.own = nn.Parameter(torch.full((n_mixed,), 0.5))
            self.logits = nn.Parameter(residual.slope * torch.arange(n_mixed))
            self.scale = nn.Parameter(torch.tensor([float(len(plan))]))

    def forward(self):
        if self.learn == "fixed":
            return self.starts
        if self.learn == "scalar":
            weights = [tuple(scalars) for scalars in self.scalars]
        elif self.learn == "sources":
            pairs = zip(self.starts.values(), self.scalars, strict=True)
            weights = [(start[0], *scalars) for start, scalars in pairs]
        elif self.learn == "unit":
            weights = [tuple(s * ab / ab.norm()) for s, ab in zip(self.scale, self.scalars, strict=True)]
        elif self.learn == "lerp":
            weights = [(1 - share, share) for share in self.share]
        elif self.learn == "softmax":
            weights = zip(self.own, self.scale * self.logits.softmax(0), strict=True)
        else:
            raise AssertionError(f"learn={self.learn!r}: add it to MixingWeights, and where Residual's docstring says")
        return dict(zip(self.starts, weights, strict=True))


class Gate(nn.Module):
    """Weights that depend on the token: a layer's normed input x (B, T, C) -> (w_self, w_source), each a number or
    (B, G, T, 1). Heads are key and value heads. A new gate: a branch here, its name in Residual.learn and is_gated."""

    def __init__(self, cfg, residual):
        super().__init__()
        self.residual = residual
        # "sigmoid" reads the first 12 channels alone, and starts from W = 0
        self.n_in = min(12, cfg.n_embd) if residual.learn == "sigmoid" else cfg.n_embd
        std = 0.0 if residual.learn == "sigmoid" else None
        self.w = Linear(self.n_in, {"gate": cfg.n_kv_head}, bias=residual.learn == "head", std=std)

    def forward(self, x):
        z = self.w(x[..., : self.n_in])  # (B, T, G)
        z = z.transpose(1, 2).unsqueeze(-1)  # (B, G, T, 1)
        # "head" (x-transformers): (g, 1 - g), g = sigmoid(W x + b)
        if self.residual.learn == "head":
            g = z.sigmoid()
            return g, 1 - g
        # "sigmoid" (modded-nanogpt, nanochat): (w_self, l sigmoid(W x)); "relu" (SATFormer): (w_self, l relu(W x))
        activation = {"sigmoid": torch.sigmoid, "relu": torch.relu}[self.residual.learn]
        w_self, factor = self.residual.starts(1)
        return w_self, factor * activation(z)


class Attention(nn.Module):
    """One layer's attention: where q, k, v and scores of earlier layers come in. (Their hidden states enter in Block,
    and DenseFormer's average in GPT.through_blocks.)

    projected[i]: layer i's projections of this call's tokens, {"q", "k" or "v": (B, heads, T, D)}; the paper's V_1 is
    projected[0]["v"]. projected[i]["hidden"] is its input, for Block; projected["table 0"], … {"v": a token
    table's values}. used[i]: what layer i's softmax used, after mixing and borrowing; with a KV cache, keys and values
    of all tokens. Mixing needs no V_1 of older tokens, because we mix token by token, and the cache stores mixed
    values. Sources enter in steps 2 to 5 of `forward`.
    The two are arguments and results, not attributes, so that recompute and torch.compile see what depends on what.
    """

    def __init__(self, cfg, n, plan, kernel):
        super().__init__()
        self.n = n
        self.owner = plan.owner
        self.kernel = kernel
        self.n_head = cfg.n_head
        self.head_dim = cfg.head_dim
        self.norm_eps = cfg.norm_eps
        self.owns = tuple(plan.heads)  # those of "q", "k", "v" that it owns; it borrows the others
        self.n_heads_from_0 = cfg.n_kv_head - plan.heads.get("v", cfg.n_kv_head)
        self.values_are_keys = cfg.value_mode.values == "keys"
        # kept here, because peft and quantizers put modules without our attributes in the place of self.proj
        self.proj_heads = {t: heads for t, heads in plan.heads.items() if not (t == "v" and self.values_are_keys)}
        parts = {t: heads * cfg.head_dim for t, heads in self.proj_heads.items()}
        is_gpt2 = cfg.arch == "gpt2"
        self.proj = Linear(cfg.n_embd, parts, bias=is_gpt2)
        self.out = Linear(cfg.n_head * cfg.head_dim, {"o": cfg.n_embd}, bias=is_gpt2, std=residual_proj_std(cfg))
        self.mixes = [m for m in plan.mixes if m.residual.place != "input"]  # those at the input are Block's
        self.gates = nn.ModuleDict({str(m.index): Gate(cfg, m.residual) for m in self.mixes if m.residual.is_gated})

    def mixes_at(self, place, weights, x):
        """[(mix, its weights)] of the residuals that act at a place. A Gate computes them from the normed input x."""
        mixes = [m for m in self.mixes if m.residual.place == place]
        return [(m, self.gates[str(m.index)](x) if m.residual.is_gated else weights[m.index]) for m in mixes]

    def forward(self, x, angles, weights, projected, used, cache=None):
        """x (B, T, C) -> U_n W_o (B, T, C), this layer's projections, and what its softmax used.
        weights[j]: those of residual j in this layer. angles: see Rope."""
        # 1. Project q, k, v: only those that this layer owns.
        projected_here = self.project(x, angles)
        mixed = dict(projected_here)

        # 2. Mix before the softmax. ResFormer (Eq 7, arxiv.org/abs/2410.17897): V' = l_n V_n + l_1 V_1.
        #    V_1 is not detached: its gradients reach layer 0. The same line mixes queries and keys (Fig 9). A layer
        #    mixes what it owns: one that borrows keys still mixes its values.
        for m, w in self.mixes_at("before", weights, x):
            t = m.residual.of
            mixed[t] = weighted_sum(w, mixed[t], [projected[i][t] for i in m.sources])

        # 3. Borrow what this layer does not own, as its owner used it: SVFormer (Eq 10) is V' = V_1.
        #    Only owners write to the cache, so SVFormer's holds no values of the layers above 0. From here on V' is
        #    used_here["v"].
        used_here = {}
        for t in ("q", "k", "v"):
            if t not in self.owns:
                used_here[t] = used[self.owner[t]][t]
            elif t != "q" and cache is not None:
                used_here[t] = cache.extend(t, self.n, mixed[t])  # (B, G, tokens so far, D)
            else:
                used_here[t] = mixed[t]
        if self.n_heads_from_0:  # SkipV1Former
            used_here["v"] = torch.cat([used_here["v"], used[0]["v"][:, -self.n_heads_from_0 :]], dim=1)

        # 4. Attend (Eq 1): U_n = softmax(q k^T / sqrt(D)) V'. Some residuals act under this softmax.
        mask = None if cache is None else cache.mask
        u = self.attend_with_mixes(used_here, self.mixes_at("softmax", weights, x), used, mask)  # (B, H, T, D)

        # 5. Mix after the softmax. NeuTRENO (Eq 8): U_n = A_n V' + l (V_1 - V').
        for m, w in self.mixes_at("after", weights, x):
            if m.residual.map == "delta":
                v = {"mixed": mixed, "projected": projected_here}[m.residual.subtract]["v"]  # V', or V_n
                added = [repeat_heads(projected[i]["v"] - v, self.n_head) for i in m.sources]  # (B, H, T, D) each
            elif m.residual.map == "identity":  # U_n = A_n V' + l V_1 (Fig 10); with all layers' values Eq 6
                added = [repeat_heads(projected[i]["v"], self.n_head) for i in m.sources]
            else:
                assert m.residual.of == "probs", f"{m.residual} is not computed anywhere: add it here"
                pairs = [(used[i]["q"], used[i]["k"]) for i in m.sources]
                added = [attend(q, k, used_here["v"], self.kernel, mask=mask) for q, k in pairs]  # A_i V'
            u = weighted_sum(w, u, added)

        # 6. Join the heads: (B, H, T, D) -> (B, T, H * D) -> (B, T, C).
        return self.out(u.transpose(1, 2).flatten(2)), projected_here, used_here

    def project(self, x, angles):
        """The tensors that this layer owns, from one product: {t: (B, heads of t, T, D)}, q and k rotated."""
        # one product, then a view for each tensor
        y = self.proj(x).unflatten(-1, (-1, self.head_dim))  # (B, T, heads * D) -> (B, T, heads, D)
        parts = y.split(list(self.proj_heads.values()), dim=2)
        projected_here = dict(zip(self.proj_heads, parts, strict=True))  # (B, T, heads of t, D) each
        if self.values_are_keys:
            v = F.rms_norm(projected_here["k"], (self.head_dim,), eps=self.norm_eps)
            projected_here["v"] = v.to(y.dtype)  # under autocast v is fp32
        # rotary positions rotate queries and keys, but not values
        for t in ("q", "k"):
            if t in projected_here:
                projected_here[t] = apply_rope(projected_here[t], angles)
        # only now (B, heads, T, D), as a view: attention's output and gradient then have the layout that `out` reads
        return {t: part.transpose(1, 2) for t, part in projected_here.items()}

    def attend_with_mixes(self, used_here, mixes, used, mask):
        """U_n (B, H, T, D) of q, k, v in `used_here`, with the residuals that act under the softmax."""
        q, k, v = used_here["q"], used_here["k"], used_here["v"]
        # "cross" (Eq 2): keys and values of other layers beside this layer's own
        across = [i for m, _ in mixes if m.residual.map == "cross" for i in m.sources]
        if across:
            keys, values = [k, *(used[i]["k"] for i in across)], [v, *(used[i]["v"] for i in across)]
            return attend_across(q, keys, values, self.kernel, mask)
        # "scores": w_n q k^T + w_i q_i k_i^T = [w_n q, w_i q_i] [k, k_i]^T, so they add up in one wider product
        for m, w in mixes:
            assert m.residual.of == "scores", f"add {m.residual} to Attention.attend_with_mixes"
            q, k = join_scores(q, k, w, [used[i] for i in m.sources])
        wider = q.size(-1) - self.head_dim
        if not wider:
            return attend(q, k, v, self.kernel, mask=mask)
        # fused kernels want one width for q, k and v
        v = F.pad(v, (0, wider))
        return attend(q, k, v, self.kernel, self.head_dim**-0.5, mask)[..., : self.head_dim]


class Block(nn.Module):
    """One layer: x (B, T, C) -> x (B, T, C), and what later layers read from it: projected (and its input,
    "hidden"), and used."""

    def __init__(self, cfg, n, plan, kernel):
        super().__init__()
        self.keep_projected = plan.keep_projected
        self.keep_used = plan.keep_used
        self.is_cut = cfg.value_mode.cut_first and n == 0
        self.norm1 = new_norm(cfg)
        self.attn = Attention(cfg, n, plan, kernel)
        self.norm2 = new_norm(cfg)
        self.mlp = MLP(cfg)
        self.input_mixes = [m for m in plan.mixes if m.residual.place == "input"]

    def forward(self, x, angles, weights, projected, used, cache=None):
        # residuals of "hidden" mix earlier layers' inputs into the stream itself
        h = x
        for m in self.input_mixes:
            h = weighted_sum(weights[m.index], h, [projected[i]["hidden"] for i in m.sources])
        # attention and the MLP add to the stream
        y, projected_here, used_here = self.attn(self.norm1(h), angles, weights, projected, used, cache)
        h = y.to(h.dtype) if self.is_cut else h + y  # under autocast y is bf16, h is fp32
        h = h + self.mlp(self.norm2(h))
        # if a block handed on all of its tensors, they would stay in memory until the last layer
        kept_projected = {t: (projected_here | {"hidden": x})[t] for t in self.keep_projected}
        return h, kept_projected, {t: used_here[t] for t in self.keep_used}


class GPT(nn.Module):
    """The model. attn: "sdpa", "flash" or "eager" (see `attend`), which changes no number beyond rounding.
    recompute: activation checkpointing. The forward keeps a block's inputs (x, and what it reads from earlier layers),
    and the backward computes the inside of the block a second time. init=False: a checkpoint will set the weights."""

    def __init__(self, cfg, seed=0, attn="sdpa", init=True, recompute=False):
        super().__init__()
        self.cfg = cfg
        self.recompute = recompute
        # what comes in: token ids, their positions, and the values of token tables where the mode has some
        plan = plan_layers(cfg)
        self.embed = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        if cfg.arch == "gpt2":
            self.positions = nn.Embedding(cfg.block_size, cfg.n_embd)
            self.rope = None
        else:
            self.positions = None
            self.rope = Rope(cfg.head_dim, cfg.block_size, cfg.rope_theta, cfg.rope_scaling)
        token_mixes = [m for layer in plan for m in layer.mixes if m.residual.source == "token"]
        starts_from_0 = {m.sources[0]: m.residual.tables == "one" for m in token_mixes}  # {"table 0": …}
        self.tables = nn.ModuleList()
        for t in range(len(starts_from_0)):
            self.tables.append(nn.Embedding(cfg.vocab_size, cfg.n_kv_head * cfg.head_dim))
            self.tables[t].std = 0.0 if starts_from_0[f"table {t}"] else cfg.n_embd**-0.5
        # the layers, and what mixes them. Mixing weights are here, because some of them are shared by all layers
        self.mixing = nn.ModuleList(MixingWeights(r, j, plan) for j, r in enumerate(cfg.value_mode.residuals))
        self.blocks = nn.ModuleList(Block(cfg, n, layer, attn) for n, layer in enumerate(plan))
        self.dense = DepthAverage(cfg.n_layer, *cfg.value_mode.dense) if cfg.value_mode.dense else None
        self.norm = new_norm(cfg)
        self.head = Linear(cfg.n_embd, {"head": cfg.vocab_size})
        if init and not self.embed.weight.is_meta:
            self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed):
        """N(0, std^2) for every matrix, each from (seed, its name), so modes share the weights of equal name and shape.
        A fused product is drawn part by part, so its weights do not depend on what is fused. std is the config's
        init_std, but 1/sqrt(C) for token tables (nanochat's), 0 with tables="one", and Linear.std where that is set."""
        # norms start at 1 and biases at 0; each matrix draws from a random stream of its own
        for name, module in self.named_modules():
            if isinstance(module, (nn.RMSNorm, nn.LayerNorm)):
                module.weight.fill_(1)
            elif isinstance(module, nn.Embedding):
                std = getattr(module, "std", self.cfg.init_std)  # token tables have their own
                module.weight.copy_(normal(seed, name, module.weight.shape, std))
            elif isinstance(module, Linear):
                std = self.cfg.init_std if module.std is None else module.std
                shapes = {f"{name}.{part}": (width, module.in_features) for part, width in module.parts.items()}
                module.weight.copy_(torch.cat([normal(seed, part, shape, std) for part, shape in shapes.items()]))
            if getattr(module, "bias", None) is not None:
                module.bias.zero_()

    def hidden(self, idx, cache=None):
        """Token ids (B, T), or their embeddings (B, T, C) -> normed output of the last layer (B, T, C). cache: a
        KVCache, whose tokens come before these (it then stores these too), or another class with its methods."""
        # where these tokens stand: at the beginning, or after those of the cache
        B, T = idx.shape[:2]
        assert cache is not None or T <= self.cfg.block_size, f"{T} tokens do not fit block_size={self.cfg.block_size}"
        positions = slice(T) if cache is None else cache.positions(T)  # a slice, or (B, T)
        # the residual stream begins with the embeddings
        x = idx if idx.is_floating_point() else self.embed(idx)
        if self.positions:
            x = x + self.positions(torch.arange(self.cfg.block_size, device=x.device)[positions])  # (T, C) or (B, T, C)
        # rotary angles are computed once for all layers
        angles = self.rope(positions) if self.rope else None
        projected = {}  # the values of token tables, (B, T, G * D) -> (B, G, T, D)
        for t, table in enumerate(self.tables):
            projected[f"table {t}"] = {"v": table(idx).view(B, T, self.cfg.n_kv_head, -1).transpose(1, 2)}
        x = self.through_blocks(x, angles, projected, cache)
        if cache is not None:
            cache.advance(T)
        return self.norm(x)

    def through_blocks(self, x, angles, projected, cache=None):
        """The residual stream x (B, T, C) through all blocks. projected, used: what earlier layers (and token tables)
        pass to later ones, {layer: {name: tensor}}."""
        used = {}
        stream = [x]  # x by depth, for DenseFormer
        weights = [mixing() for mixing in self.mixing]  # [residual] -> {layer: its weights}
        for n, block in enumerate(self.blocks):
            # copies, because checkpoint keeps its arguments: a shared dict would come to hold this block's own output,
            # a cycle that leaks if no backward runs
            inputs = (x, angles, [w.get(n) for w in weights], dict(projected), dict(used), cache)
            if self.recompute and torch.is_grad_enabled():
                x, projected[n], used[n] = checkpoint(block, *inputs, use_reentrant=False)
            else:
                x, projected[n], used[n] = block(*inputs)
            if self.dense:
                stream.append(x)
                x = self.dense(n + 1, stream)
        return x

    def forward(self, idx, targets=None, cache=None):
        """Token ids (B, T) -> (logits (B, T, V), None); with targets (B, T), below 0 = ignored, -> (None, loss): the
        mean cross-entropy in nats. Then the logits never exist all at once, see net/loss.py."""
        # logits only where they are asked for: with targets the loss makes them, a chunk at a time
        x = self.hidden(idx, cache)
        if targets is None:
            return self.head(x), None
        x, targets = x.flatten(0, 1), targets.flatten()
        if type(self.head) is Linear:
            return None, chunked_cross_entropy(x, self.head.weight, targets)
        # a tool has replaced the head: what is there may add to W x, as LoRA does, so the loss reads its logits
        nats = F.cross_entropy(to_fp32(self.head(x)), targets.clamp(min=-1), ignore_index=-1, reduction="sum")
        return None, nats / (targets >= 0).sum().clamp(min=1)


class KVCache:
    """Keys (rotated) and values (mixed) of B rows: (B, G, length, D) for each K and V that a layer owns.

    lengths: tokens of each row's prompt. Shorter prompts are padded on the left, so the next token of every row goes
    into the same slot, but each row counts its own positions, and its padding is masked. is_static: every step reads
    all slots, and the mask hides those ahead; then no shape changes, and torch.compile needs one graph for all steps.
    """

    def __init__(self, cfg, lengths, length, device=None, dtype=None):
        self.length = length
        self.end = 0  # slots that are filled
        self.is_static = False
        self.mask = None
        self.next = torch.zeros(1, dtype=torch.int64, device=device)  # the same as a tensor, which a graph can count up
        # padding is on the left, so a row's positions are its slots minus its padding
        self.padding = max(lengths) - torch.tensor(lengths, device=device)[:, None]  # (B, 1)
        self.is_padded = min(lengths) < max(lengths)
        self.last = cfg.block_size - 1
        # a tensor for each K and V that a layer owns, none for what it borrows: SVFormer's cache is just over half
        self.tensors = {}
        for place, heads in stored_tensors(cfg).items():
            self.tensors[place] = torch.zeros(len(lengths), heads, length, cfg.head_dim, device=device, dtype=dtype)

    def positions(self, T):
        """Where the next T tokens stand in their rows: a slice, or (B, T). Sets `slots`, where they are stored, and
        `mask`, what they see. Prompts of 3 and 1 tokens: slots 0 1 2, positions 0 1 2 and - - 0."""
        self.slots = self.next + torch.arange(T, device=self.next.device)  # (T,)
        if not self.is_padded and not self.is_static:
            return slice(self.end, self.end + T)
        here = self.slots[:, None]  # (T, 1)
        there = torch.arange(self.length if self.is_static else self.end + T, device=self.next.device)  # (S,)
        seen = (there <= here) & (there >= self.padding[:, :, None])  # (B, T, S)
        seen = seen | (there == here)  # padding sees itself, because a softmax over nothing is NaN
        self.mask = torch.zeros(seen.shape, device=seen.device).masked_fill(~seen, -math.inf)[:, None]  # (B, 1, T, S)
        return (self.slots - self.padding).clamp(0, self.last)  # a full row goes on; nobody reads what it adds

    def extend(self, t, n, new):
        """Store `new` (B, G, T, D) after what tensor t of layer n has; returns all so far, or all slots if static."""
        store = self.tensors[t, n].index_copy_(2, self.slots, new.to(self.tensors[t, n].dtype))
        return store if self.is_static else store.narrow(2, 0, self.end + new.size(2))

    def advance(self, T):
        self.next.add_(T)
        if not self.is_static:
            self.end += T

    @property
    def nbytes(self):
        return sum(t.nbytes for t in self.tensors.values())


if __name__ == "__main__":
    # need, not import: transformers refuses an exported model.py that imports what does not come with it
    run(need("common.sizes").main, __doc__, skip_unknown=True)
