"""Recipe sections of a policy's loss: the loss itself, its KL penalty, its correction for another sampler."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from isotrain.language import tr
from isotrain.recipe.section import DefaultFor, Section

Rejection = Literal[
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
]
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


class PluginSection(Section):
    name: str
    """Name of the entry point in the installed package."""
    options: dict[str, Any] = Field(default={})
    """Keyword arguments for the call."""


class LossSection(Section):
    name: Literal["clip", "gspo", "cispo", "reinforce", "gmpo", "sapo", "dppo-tv", "dppo-kl"] = "clip"
    """The policy loss."""
    clip_ratio_low: float = Field(default=0.2, ge=0)
    """Lower clip range: the ratio of new to old probability is clipped at `1 - clip_ratio_low`; `gmpo`: its
    logarithm at `-clip_ratio_low`; `dppo-tv`, `dppo-kl`: the largest divergence at a negative advantage."""
    clip_ratio_high: float = Field(default=0.2, ge=0)
    """Upper clip range: the ratio is clipped at `1 + clip_ratio_high`; 0.28 is DAPO's clip-higher. `gmpo`,
    `dppo-tv` and `dppo-kl` as with `clip_ratio_low`."""
    tau_pos: float = Field(default=1.0, gt=0)
    """Temperature of `sapo` where the advantage is > 0."""
    tau_neg: float = Field(default=1.05, gt=0)
    """Temperature of `sapo` elsewhere."""
    max_ratio: float = Field(default=20.0, gt=1)
    """Upper bound of the ratio in `dppo-tv` and `dppo-kl`."""
    dual_clip: Annotated[float | None, DefaultFor("openrlhf", None), DefaultFor("trl", None)] = Field(
        default=3.0, gt=1
    )
    """Dual-clip constant c: the loss is capped at `-c * A` where the advantage A < 0; null for no cap."""
    aggregation: Aggregation | None = None
    """How token losses are aggregated; by default `token-mean`, for `gspo`, `gmpo` and `sapo`
    `seq-mean-token-mean`."""
    entropy: float = Field(default=0.0, ge=0)
    """Coefficient of the entropy bonus."""
    plugin: PluginSection | None = None
    """A policy loss from an installed package, in place of `name`."""

    @property
    def aggregates(self) -> Aggregation:
        """The aggregation in use, given or by default."""
        by_sequence = self.name in ("gspo", "gmpo", "sapo")
        return self.aggregation or ("seq-mean-token-mean" if by_sequence else "token-mean")

    @property
    def options(self) -> dict[str, float | None]:
        """Keyword arguments of the loss beside its aggregation."""
        if self.name in ("reinforce", "sapo"):
            return {"tau_pos": self.tau_pos, "tau_neg": self.tau_neg} if self.name == "sapo" else {}
        more = {"dual_clip": self.dual_clip} if self.name == "clip" else {}
        more |= {"max_ratio": self.max_ratio} if self.name.startswith("dppo") else {}
        return {"clip_ratio_low": self.clip_ratio_low, "clip_ratio_high": self.clip_ratio_high, **more}


class KlSection(Section):
    place: Literal["off", "reward", "loss"] = "off"
    """Where the KL penalty against the reference policy is added: nowhere, to the reward, or to the loss."""
    coefficient: float = Field(default=0.001, ge=0)
    """Coefficient of the penalty."""
    estimator: Annotated[Literal["k1", "abs", "k2", "k3"], DefaultFor("reward", "k1")] = "k3"
    """Estimator of the KL divergence from sampled tokens; the default depends on `place`."""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """Keep the coefficient fixed, or adapt it to reach `target` (only with `place: reward`)."""
    target: float = Field(default=0.1, gt=0)
    """Target KL divergence of the adaptive controller."""
    horizon: int = Field(default=10_000, ge=1)
    """Number of trajectories over which the adaptive coefficient changes by at most 20 %."""

    @model_validator(mode="after")
    def _only_rewards_adapt(self) -> KlSection:
        if self.controller == "adaptive" and self.place != "reward":
            raise ValueError(tr("controller: adaptive needs place: reward: set it, or use controller: fixed"))
        return self


class DistillationSection(Section):
    path: str | None = None
    """Model directory of the teacher, with the policy's tokenizer; null for no distillation."""
    loss: Literal["policy-gradient", "k2", "k3", "forward-kl", "reverse-kl", "jsd"] = "policy-gradient"
    """`policy-gradient`: the teacher's minus the policy's log-prob is the advantage of a sampled token. `k2`,
    `k3`: estimates of the reverse KL as a loss. The others: divergences over the vocabulary as a loss."""
    top_k: int | None = Field(default=None, ge=1)
    """Compare only so many tokens that are likely for the teacher, and the others as one; null for all."""
    coefficient: float = Field(default=1.0, gt=0)
    """Coefficient of the distillation loss."""
    clamp: float | None = Field(default=None, gt=0)
    """Largest size of a token's advantage or divergence; null for no limit beyond the estimators' own."""
    task_rewards: bool = True
    """Learn from rewards as well; false only shows them."""

    @property
    def over_vocabulary(self) -> bool:
        """Whether whole distributions are compared, and not sampled tokens."""
        return self.loss in ("forward-kl", "reverse-kl", "jsd")

    @model_validator(mode="after")
    def _is_complete(self) -> DistillationSection:
        if self.path is None and not self.task_rewards:
            raise ValueError(tr("task_rewards (false) leaves nothing to learn from: set path, or remove it"))
        if self.top_k is not None and not self.over_vocabulary:
            raise ValueError(
                tr(
                    "top_k cannot be used with loss {loss}: write forward-kl, reverse-kl or jsd",
                    loss=self.loss,
                )
            )
        return self


class RolloutCorrectionSection(Section):
    level: Literal["off", "token", "sequence", "geometric"] = "off"
    """Level of the importance weights between rollout engine and trained model: none, token, the product over
    the response, or its geometric mean."""
    mode: Literal["truncate", "mask"] = "truncate"
    """What to do with weights beyond the bounds: truncate them to the bound, or mask the token."""
    upper: float = Field(default=2.0, gt=0)
    """Upper bound of the weights."""
    lower: float | None = Field(default=None, ge=0)
    """Lower bound; by default none for `truncate`, `1 / upper` for `mask`."""
    reject: dict[Rejection, float | tuple[float, float]] = Field(default={})
    """Tokens or responses to leave out, by verl's names of what is bounded: `{seq_mean_k1: [0.99, 1.01]}`."""
    bypass_mode: bool = False
    """Take the engine's log-probs for the old ones: a forward pass less, and the policy loss corrects."""

    @property
    def is_on(self) -> bool:
        return self.level != "off" or bool(self.reject) or self.bypass_mode

    @property
    def bounds(self) -> dict[str, tuple[float, float]]:
        """Lower and upper bound of each statistic of `reject`; those of a k1 are ratios."""
        return {
            name: bound if isinstance(bound, tuple) else (1 / bound if name.endswith("k1") else 0.0, bound)
            for name, bound in self.reject.items()
        }

    @model_validator(mode="after")
    def _some_weights_are_inside(self) -> RolloutCorrectionSection:
        if self.lower is not None and self.lower >= self.upper:
            raise ValueError(
                tr(
                    "lower ({lower:g}) must be below upper ({upper:g}): lower it, or raise upper",
                    lower=self.lower,
                    upper=self.upper,
                )
            )
        if self.mode == "mask" and self.lower is None and self.upper <= 1:
            raise ValueError(
                tr(
                    "upper ({upper:g}) masks every token with mode: mask, where lower is 1 / upper: raise "
                    "it above 1, or set lower",
                    upper=self.upper,
                )
            )
        return self

    @field_validator("reject")
    @classmethod
    def _some_tokens_are_inside(
        cls, reject: dict[Rejection, float | tuple[float, float]]
    ) -> dict[Rejection, float | tuple[float, float]]:
        for name, bound in reject.items():
            if isinstance(bound, float):
                # Both policies the same is a ratio of 1, and a distance of 0.
                fits = bound > (1 if name.endswith("k1") else 0)
            else:
                fits = name.endswith("k1") and 0 < bound[0] < 1 < bound[1]
            if not fits:
                raise ValueError(
                    tr(
                        "{name} must have equal probabilities inside its bounds: k1 needs a ratio above "
                        "1, or two around it ([0.99, 1.01]), k2 and k3 a number above 0",
                        name=name,
                    )
                )
        return reject
