"""What the user writes for online reinforcement learning: algorithm, rollout, rewards, cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from isotrain.recipe.section import Affects, DefaultFor, Section

# vLLM raises lower temperatures to this one without a word, and the ranks would compute with another.
COLDEST = 0.01

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


class PluginSection(Section):
    name: str
    """Name of the entry point that an installed package has for it."""
    options: dict[str, Any] = Field(default={})
    """Keyword arguments that it is called with."""


class LossSection(Section):
    name: Literal["clip", "gspo", "cispo", "reinforce"] = "clip"
    """The policy loss."""
    clip_ratio_low: float = Field(default=0.2, ge=0)
    """The ratio of new to old probability is clipped at `1 - clip_ratio_low` below."""
    clip_ratio_high: float = Field(default=0.2, ge=0)
    """And at `1 + clip_ratio_high` above; 0.28 is DAPO's clip-higher."""
    dual_clip: Annotated[float | None, DefaultFor("openrlhf", None), DefaultFor("trl", None)] = Field(
        default=3.0, gt=1
    )
    """Largest loss of a token with a negative advantage, in advantages; null for no limit."""
    aggregation: Aggregation | None = None
    """How losses of tokens become one number; by default `token-mean`, for `gspo` `seq-mean-token-mean`."""
    entropy: float = Field(default=0.0, ge=0)
    """Coefficient of the entropy bonus."""
    plugin: PluginSection | None = None
    """A policy loss of an installed package, in place of `name`."""


class KlSection(Section):
    place: Literal["off", "reward", "loss"] = "off"
    """Where the divergence from the reference is a penalty: nowhere, in the reward, or in the loss."""
    coefficient: float = Field(default=0.001, ge=0)
    """Strength of the penalty."""
    estimator: Annotated[Literal["k1", "abs", "k2", "k3"], DefaultFor("reward", "k1")] = "k3"
    """How the divergence is estimated from sampled tokens; the default follows `place`."""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """Whether the coefficient stays, or is steered towards `target` (in the reward only)."""
    target: float = Field(default=0.1, gt=0)
    """The divergence that the adaptive controller steers to."""
    horizon: int = Field(default=10_000, ge=1)
    """Trajectories in which the adaptive coefficient changes by at most 20 %."""

    @model_validator(mode="after")
    def _only_rewards_adapt(self) -> KlSection:
        if self.controller == "adaptive" and self.place != "reward":
            raise ValueError("controller adaptive needs place: reward, because it steers by that penalty")
        return self


class RolloutCorrectionSection(Section):
    level: Literal["off", "token", "sequence"] = "off"
    """Importance weights for what the rollout engine sampled: none, of tokens, or of whole responses."""
    mode: Literal["truncate", "mask"] = "truncate"
    """What happens to weights beyond the bounds: cut to the bound, or the token left out."""
    upper: float = Field(default=2.0, gt=0)
    """Upper bound of the weights."""
    lower: float | None = Field(default=None, ge=0)
    """Lower bound; by default none for `truncate`, `1 / upper` for `mask`."""

    @model_validator(mode="after")
    def _some_weights_are_inside(self) -> RolloutCorrectionSection:
        if self.lower is not None and self.lower >= self.upper:
            raise ValueError(
                f"lower ({self.lower:g}) is not below upper ({self.upper:g}): lower it, or raise upper"
            )
        if self.mode == "mask" and self.lower is None and self.upper <= 1:
            raise ValueError(
                f"upper ({self.upper:g}) leaves nothing inside with mode: mask, where lower is 1 / upper: "
                "raise it above 1, or set lower"
            )
        return self


class DynamicSamplingSection(Section):
    max_attempts: int = Field(default=0, ge=0)
    """How often prompts whose responses all have the same reward are replaced by new ones; 0 keeps them."""


class OverlongSection(Section):
    buffer: int = Field(default=0, ge=0)
    """Length of the stretch before `rollout.max_tokens` in which responses lose reward; 0 for none."""
    factor: float = Field(default=1.0, gt=0)
    """What a response of full length loses."""


class CriticSection(Section):
    path: str | None = None
    """Model directory of the critic; by default that of the policy, with a fresh value head."""
    lr: float = Field(default=1e-5, ge=0)
    """Learning rate of the critic."""
    clip: float | None = Field(default=0.5, gt=0)
    """How far a value may move from its old one before the loss holds it; null for no limit."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps in which the critic alone learns."""


class OnlineSection(Section):
    """What all online algorithms share."""

    needs: ClassVar[Mapping[str, str]] = {
        "rollout": "to sample responses: write 'rollout: {n: 4}'",
        "reward": "to score responses: write 'reward: {gsm8k: {}}'",
    }
    conventions: ClassVar[tuple[str, ...]] = ("verl", "openrlhf", "trl")
    """The frameworks that have this algorithm."""

    name: str
    """Narrowed by each algorithm; here so that it comes first wherever fields are listed."""
    mini_batch_size: int | None = Field(default=None, ge=1)
    """Prompts of one optimizer update; by default all of the step's."""
    ppo_epochs: int = Field(default=1, ge=1)
    """Passes over the responses of a step."""
    convention: Literal["verl", "openrlhf", "trl"] = "verl"
    """Whose constants the advantages and their whitening have, and whose default `loss.dual_clip`."""
    advantage: PluginSection | None = None
    """An advantage estimator of an installed package, in place of the algorithm's own."""
    loss: LossSection = LossSection()
    """The policy loss."""
    kl: KlSection = KlSection()
    """Divergence from the reference policy."""
    rollout_correction: RolloutCorrectionSection = RolloutCorrectionSection()
    """For the difference between the rollout engine's and the trained model's probabilities."""
    dynamic_sampling: DynamicSamplingSection = DynamicSamplingSection()
    """DAPO's dynamic sampling."""
    overlong: OverlongSection = OverlongSection()
    """DAPO's overlong reward shaping."""

    @model_validator(mode="after")
    def _the_framework_has_it(self) -> OnlineSection:
        if self.convention not in self.conventions:
            raise ValueError(
                f"convention ({self.convention}) is of a framework without {self.name}: "
                f"write {' or '.join(self.conventions)}"
            )
        return self

    @model_validator(mode="after")
    def _defaults(self) -> OnlineSection:
        # In place although sections are frozen: nobody has seen this one yet.
        self.__dict__.update(loss=self.loss.for_case(self.convention), kl=self.kl.for_case(self.kl.place))
        return self


class GrpoSection(OnlineSection):
    name: Annotated[Literal["grpo"], Affects.RESPONSES]
    """Group relative policy optimisation: rewards compared within the responses to one prompt."""
    scale_by_std: bool = True
    """Divide by the group's standard deviation; false is Dr. GRPO."""


class RlooSection(OnlineSection):
    name: Annotated[Literal["rloo"], Affects.RESPONSES]
    """REINFORCE leave-one-out: rewards minus the mean of the group's other responses."""


class ReinforcePlusPlusSection(OnlineSection):
    conventions: ClassVar[tuple[str, ...]] = ("verl", "openrlhf")

    name: Annotated[Literal["reinforce++"], Affects.RESPONSES]
    """Discounted returns, whitened over the batch."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount of a token."""


class ReinforcePlusPlusBaselineSection(OnlineSection):
    conventions: ClassVar[tuple[str, ...]] = ("verl", "openrlhf")

    name: Annotated[Literal["reinforce++-baseline"], Affects.RESPONSES]
    """Rewards minus their group's mean, whitened over the batch."""


class RemaxSection(OnlineSection):
    conventions: ClassVar[tuple[str, ...]] = ("verl",)

    name: Annotated[Literal["remax"], Affects.RESPONSES]
    """Returns minus the reward of the greedy response."""


class PpoSection(OnlineSection):
    conventions: ClassVar[tuple[str, ...]] = ("verl", "openrlhf")

    name: Annotated[Literal["ppo"], Affects.RESPONSES]
    """Proximal policy optimisation with a critic."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount of a token."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """Lambda of generalised advantage estimation."""
    critic: CriticSection = CriticSection()
    """The critic."""


Online = (
    GrpoSection
    | RlooSection
    | ReinforcePlusPlusSection
    | ReinforcePlusPlusBaselineSection
    | RemaxSection
    | PpoSection
)


class ValidationSection(Section):
    affects: ClassVar[Affects] = Affects.COURSE

    n: int = Field(default=1, ge=1)
    """Responses to each validation prompt."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature of validation; 0 is greedy, otherwise at least 0.01."""

    @field_validator("temperature")
    @classmethod
    def _greedy_or_sampled(cls, value: float) -> float:
        if 0 < value < COLDEST:
            raise ValueError(
                f"between 0 and {COLDEST}, which engines would raise; write 0 for greedy responses"
            )
        return value


class RolloutSection(Section):
    engine: Literal["vllm", "sglang", "hf"] = "vllm"
    """What generates: vLLM; SGLang (unverified: has not run against a real SGLang server or device); or the
    slow reference built on transformers, which runs on any device."""
    n: Annotated[int, Affects.RESPONSES] = Field(default=1, ge=1)
    """Responses to each prompt."""
    max_tokens: Annotated[int, Affects.RESPONSES] = Field(default=512, ge=1)
    """Longest response in tokens."""
    temperature: Annotated[float, Affects.RESPONSES] = Field(default=1.0, ge=COLDEST)
    """Sampling temperature."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the most likely tokens that together have this probability."""
    top_k: int = Field(default=-1, ge=-1)
    """Sample from this many most likely tokens; -1 for all."""
    staleness: int = Field(default=0, ge=0)
    """Weight versions by which responses may be older than the model that learns from them; 0 is
    on-policy."""
    engines: Annotated[int, Affects.EXECUTION] = Field(default=1, ge=1)
    """Generation engines."""
    tensor_parallel: Annotated[int, Affects.EXECUTION] = Field(default=1, ge=1)
    """Devices that one engine is split over."""
    memory_utilization: Annotated[float, Affects.EXECUTION] = Field(default=0.5, gt=0, le=1)
    """Share of an accelerator's memory for the engine's weights and cache."""
    kv_cache_gb: Annotated[float, Affects.EXECUTION] = Field(default=2.0, gt=0)
    """Size of the engine's cache in GiB where it lives in host memory."""
    eager: Annotated[bool | None, Affects.EXECUTION] = None
    """Run the engine without compiling its model or capturing graphs: slower steps, but it starts in seconds;
    by default on the CPU only."""
    server_python: Annotated[str | None, Affects.EXECUTION] = None
    """With `sglang`: the Python of the environment it is installed in; by default the one that trains."""
    update_timeout: Annotated[float, Affects.EXECUTION] = Field(default=300.0, gt=0)
    """Seconds after which a weight update that has not ended ends the run."""
    weight_check_tolerance: Annotated[float | None, Affects.EXECUTION] = Field(default=None, gt=0)
    """Largest mean difference of engine's and trained model's log-probs after an update; by default decided
    by `model.dtype` and the updates before."""
    record: Annotated[bool, Affects.EXECUTION] = False
    """Write all trajectories to Parquet in the run directory."""
    replay: Annotated[str | None, Affects.SOURCE] = None
    """A run directory whose recorded trajectories are trained on instead of new responses, for
    `isotrain parity replay`: no engine and no reward worker is started, and nothing is validated."""
    validation: ValidationSection = ValidationSection()
    """How responses to validation prompts are sampled."""

    @property
    def generates(self) -> bool:
        """Whether there are engines that generate."""
        return self.replay is None


class Gsm8kSection(Section):
    method: Literal["strict", "flexible"] = "strict"
    """`strict` wants the response after `####`, `flexible` takes the last number."""
    format_score: float = 0.0
    """Score of a response that has the form but is wrong."""
    weight: float = 1.0
    """Factor of this reward in the sum."""


class MathSection(Section):
    processes: Annotated[int | None, Affects.EXECUTION] = Field(default=None, ge=1)
    """Most processes of one worker; by default one for each core, 8 at most."""
    weight: float = 1.0
    """Factor of this reward in the sum."""


class FunctionSection(Section):
    path: str = Field(pattern=r"^[^:\x00]+\.py:[A-Za-z_]\w*$")
    """A Python file and a function in it, `rewards.py:score`; it may be async."""
    concurrency: Annotated[int | None, Affects.EXECUTION] = Field(default=None, ge=1)
    """Calls at the same time in one worker: of an async function in one process, by default 16; of another in
    a process each, by default one for each core, 8 at most."""
    start_timeout: Annotated[float, Affects.EXECUTION] = Field(default=120.0, gt=0)
    """Seconds within which the file must be imported."""
    memory_gb: Annotated[float | None, Affects.COURSE] = Field(default=None, gt=0)
    """Most GiB of address space of one process; by default there is no limit."""
    environment: Annotated[list[str], Affects.EXECUTION] = Field(default=[])
    """Names of environment variables that the function needs, such as `JUDGE_API_KEY`: keys and tokens that
    are not named here stay out of its processes."""
    weight: float = 1.0
    """Factor of this reward in the sum."""


class RewardPluginSection(PluginSection):
    concurrency: Annotated[int | None, Affects.EXECUTION] = Field(default=None, ge=1)
    """Calls at the same time in one worker, as for `reward.function`."""
    start_timeout: Annotated[float, Affects.EXECUTION] = Field(default=120.0, gt=0)
    """Seconds within which the package must be imported."""
    memory_gb: Annotated[float | None, Affects.COURSE] = Field(default=None, gt=0)
    """Most GiB of address space of one process; by default there is no limit."""
    environment: Annotated[list[str], Affects.EXECUTION] = Field(default=[])
    """Names of environment variables that it needs, as for `reward.function`."""
    weight: float = 1.0
    """Factor of this reward in the sum."""


class RewardModelSection(Section):
    path: str
    """A Hugging Face directory of a sequence classifier with one label."""
    weight: float = 1.0
    """Factor of this reward in the sum."""


class ProcessRewardSection(Section):
    path: str
    """A model directory, as `isotrain export` writes it after `algorithm.name: prm`: a language model or a
    token classifier with two labels; its tokenizer must be the policy's."""
    step_separator: str = "\n"
    """What ends a step of a response."""
    good_token: str = "+"
    """A language model's token for a right step."""
    bad_token: str = "-"
    """And for a wrong one."""
    aggregate: Literal["min", "mean", "product", "last"] = "min"
    """From the probabilities that the steps are right to the score of the response; without a step it is
    0."""
    weight: float = 1.0
    """Factor of this reward in the sum."""


class RewardSection(Section):
    gsm8k: Gsm8kSection | None = None
    """Final answers of GSM8K compared as text."""
    math: MathSection | None = None
    """Final answers compared as mathematics, with math-verify."""
    function: FunctionSection | None = None
    """A function of yours."""
    model: RewardModelSection | None = None
    """A reward model."""
    process: ProcessRewardSection | None = None
    """A process reward model, which scores the steps of responses."""
    plugin: RewardPluginSection | None = None
    """A reward of an installed package."""
    answer_key: str = "reward_model.ground_truth"
    """Column of the right answer; a dotted path reaches into structures."""
    timeout: Annotated[float, Affects.COURSE] = Field(default=10.0, gt=0)
    """Seconds after which a call has failed; the sample then has `failed_score`."""
    failed_score: float = 0.0
    """Score of a sample whose reward could not be computed."""
    workers: Annotated[int, Affects.EXECUTION] = Field(default=1, ge=1)
    """Processes that compute rewards."""

    @model_validator(mode="after")
    def _one_at_least(self) -> RewardSection:
        if not (self.gsm8k or self.math or self.function or self.plugin or self.reward_models):
            raise ValueError(
                "no reward is named; add one of gsm8k, math, function, plugin, model, process, such as "
                "gsm8k: {}"
            )
        return self

    @property
    def reward_models(self) -> list[str]:
        """The rewards that models on the training ranks give."""
        return [name for name in ("model", "process") if getattr(self, name) is not None]


class ClusterSection(Section):
    affects: ClassVar[Affects] = Affects.EXECUTION

    address: str = Field(default="auto", pattern=r"^(auto|local|[^/\s]+:\d+)$")
    """A running Ray cluster as host:port, `local` for a private one, or `auto` for either."""
    placement: Literal["colocated", "separate"] = "colocated"
    """Whether rollout and training take turns on the same devices, or have their own."""
    allow_unauthenticated: bool = False
    """Join a cluster of several machines that does not check tokens."""
    offload: bool = True
    """Keep models in host memory while they are not in use, on devices that have their own."""
    start_timeout: float = Field(default=600.0, gt=0)
    """Seconds to wait for devices and engines at the start."""
