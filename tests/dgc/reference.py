"""Deep gradient compression in plain NumPy, float64, one process: the published formulas.

Written from Lin et al., arXiv:1712.01887, algorithms 1 to 4, and from nothing of the package.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass
class Reference:
    replicas: int
    momentum: float = 0.9
    sparsity: tuple[float, ...] = (0.999,)
    rampup_begin_step: int = 0
    rampup_step: int = 1
    use_nesterov: bool = False
    local_grad_clip_norm: float | None = None
    clip_scaling: str = "sqrt"
    clip_before_rampup: bool = False
    count_dtype: str = "float64"
    regularization: float = 0.0
    l1: float = 0.0
    factor_masking: bool = True
    min_size: int = 1
    step: int = 0
    u: dict = dataclasses.field(default_factory=dict)
    v: dict = dataclasses.field(default_factory=dict)
    velocity: dict = dataclasses.field(default_factory=dict)

    def update(self, gradients: dict, params: dict) -> dict:
        """`gradients`: arrays with a leading replica axis. Returns the direction of each leaf."""
        out = {}
        for name, stacked in gradients.items():
            weight = np.asarray(params[name], np.float64)
            local = [np.asarray(gradient, np.float64) for gradient in stacked]
            if weight.size >= self.min_size and self.step >= self.rampup_begin_step:
                out[name] = self._compressed(name, local, weight)
            else:
                if self.clip_before_rampup and weight.size >= self.min_size:
                    local = [self._clipped(g) for g in local]
                out[name] = self._dense(name, local, weight)
        self.step += 1
        return out

    def _clipped(self, g):
        if self.local_grad_clip_norm is None:
            return g
        power = {"sqrt": 0.5, "rsqrt": -0.5}[self.clip_scaling]
        return g * min(1.0, self.local_grad_clip_norm * self.replicas**power / np.linalg.norm(g))

    def _regularized(self, g, weight):
        return g + self.regularization * weight + self.l1 * np.sign(weight)

    def _dense(self, name, local, weight):
        mean = sum(self._regularized(g, weight) for g in local) / self.replicas
        u = self.velocity.get(name, np.zeros(weight.shape))
        u = self.momentum * (u + mean) if self.use_nesterov else self.momentum * u + mean
        self.velocity[name] = u
        return u + mean if self.use_nesterov else u

    def _compressed(self, name, local, weight):
        t, b, r, levels = self.step, self.rampup_begin_step, self.rampup_step, len(self.sparsity)
        level = self.sparsity[min(int((t - b) * levels / r), levels - 1)]
        number = getattr(np, self.count_dtype)
        k = max(1, int(number(weight.size) * (number(1) - number(level))))
        velocity = self.velocity.get(name, np.zeros(weight.shape))
        total = np.zeros(weight.size)
        for rank, g in enumerate(local):
            u = self.u.get((name, rank), velocity.ravel())
            v = self.v.get((name, rank), np.zeros(weight.size))
            g = self._regularized(self._clipped(g), weight).ravel()
            if self.use_nesterov:
                u = self.momentum * (u + g)
                v = v + u + g
            else:
                u = self.momentum * u + g
                v = v + u
            sent = np.argsort(-np.abs(v), kind="stable")[:k]
            total[sent] += v[sent]
            v[sent] = 0
            if self.factor_masking:
                u[sent] = 0
            self.u[name, rank], self.v[name, rank] = u, v
        return (total / self.replicas).reshape(weight.shape)
