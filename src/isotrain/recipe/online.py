"""Recipe sections for online reinforcement learning: algorithm, rollout, rewards, cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from isotrain.language import listed, tr
from isotrain.recipe.environment import (
    AgentSection,
    EnvironmentRewardSection,
    EnvironmentSection,
)
from isotrain.recipe.policy_loss import (
    Aggregation,
    DistillationSection,
    KlSection,
    LossSection,
    PluginSection,
    RolloutCorrectionSection,
)
from isotrain.recipe.section import Affects, Section

# vLLM silently raises lower temperatures to this one, and the ranks would compute with another.
COLDEST = 0.01


class DynamicSamplingSection(Section):
    max_attempts: int = Field(default=0, ge=0)
    """How often to replace prompts whose responses all have the same reward; 0 keeps them."""


class OverlongSection(Section):
    buffer: int = Field(default=0, ge=0)
    """Tokens before `rollout.max_tokens` over which the length penalty grows; 0 for no penalty."""
    factor: float = Field(default=1.0, gt=0)
    """Penalty of a response of `rollout.max_tokens` tokens."""


class CriticSection(Section):
    path: str | None = None
    """Model directory of the critic; by default that of the policy, with a fresh value head."""
    lr: float = Field(default=1e-5, ge=0)
    """Learning rate of the critic."""
    clip: float | None = Field(default=0.5, gt=0)
    """Clip range of the value loss: how far a value may move from its old one; null for no clipping."""
    aggregation: Aggregation | None = None
    """How token losses of the critic are aggregated; by default as those of the policy."""
    warmup_steps: int = Field(default=0, ge=0)
    """Number of first steps that train only the critic."""


class OnlineSection(Section):
    """Fields that all online algorithms share."""

    needs: ClassVar[Mapping[str, str]] = {
        "rollout": tr("to sample responses: write 'rollout: {{n: 4}}'"),
        "reward": tr("to score responses: write 'reward: {{gsm8k: {{}}}}'"),
    }
    conventions: ClassVar[tuple[str, ...]] = ("verl", "openrlhf", "trl")
    """The frameworks that have this algorithm."""

    name: str
    """Narrowed by each algorithm; here so that it comes first wherever fields are listed."""
    mini_batch_size: int | None = Field(default=None, ge=1)
    """Prompts per optimizer update; by default all prompts of the step."""
    ppo_epochs: int = Field(default=1, ge=1)
    """Passes over the responses of a step."""
    convention: Literal["verl", "openrlhf", "trl"] = "verl"
    """Framework that sets the constants of advantages and whitening, and the default of `loss.dual_clip`."""
    advantage: PluginSection | None = None
    """An advantage estimator from an installed package, in place of the algorithm's own."""
    loss: LossSection = LossSection()
    """The policy loss."""
    kl: KlSection = KlSection()
    """KL penalty against the reference policy."""
    distillation: DistillationSection = DistillationSection()
    """On-policy distillation: a teacher scores the tokens that the policy samples."""
    rollout_correction: RolloutCorrectionSection = RolloutCorrectionSection()
    """Correction for the difference between the rollout engine's and the trained model's probabilities."""
    router_replay: Literal["disabled", "R2", "R3"] = "disabled"
    """For a mixture: the experts that tokens of responses are sent to in training. `R3`: those of the engine
    that sampled them; `R2`: those of the pass for old log-probs, where a step has several updates."""
    dynamic_sampling: DynamicSamplingSection = DynamicSamplingSection()
    """DAPO's dynamic sampling."""
    overlong: OverlongSection = OverlongSection()
    """DAPO's overlong reward shaping."""

    def prompts_per_update(self, batch_size: int) -> int:
        return min(self.mini_batch_size or batch_size, batch_size)

    def updates_per_step(self, batch_size: int) -> int:
        return -(-batch_size // self.prompts_per_update(batch_size)) * self.ppo_epochs

    @model_validator(mode="after")
    def _the_framework_has_it(self) -> OnlineSection:
        if self.convention not in self.conventions:
            raise ValueError(
                tr(
                    "convention ({convention}) names a framework that does not have {name}: "
                    "write {conventions}",
                    convention=self.convention,
                    name=self.name,
                    conventions=listed(self.conventions, " or "),
                )
            )
        return self

    @model_validator(mode="after")
    def _defaults(self) -> OnlineSection:
        # Sections are frozen, but no other code has seen this one yet.
        self.__dict__.update(loss=self.loss.for_case(self.convention), kl=self.kl.for_case(self.kl.place))
        return self


class GrpoSection(OnlineSection):
    name: Annotated[Literal["grpo"], Affects.RESPONSES]
    """Group relative policy optimisation: compares rewards within the responses to one prompt."""
    scale_by_std: bool = True
    """Divide advantages by the group's standard deviation; false is Dr. GRPO."""


class RlooSection(OnlineSection):
    name: Annotated[Literal["rloo"], Affects.RESPONSES]
    """REINFORCE leave-one-out: rewards minus the mean of the group's other responses."""


class ReinforcePlusPlusSection(OnlineSection):
    conventions: ClassVar[tuple[str, ...]] = ("verl", "openrlhf")

    name: Annotated[Literal["reinforce++"], Affects.RESPONSES]
    """Discounted returns, whitened over the batch."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount factor per token."""


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
    """Discount factor per token."""
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
                tr(
                    "between 0 and {coldest}, which engines change silently; write 0 for greedy responses",
                    coldest=COLDEST,
                )
            )
        return value


class RolloutSection(Section):
    engine: Literal["vllm", "sglang", "hf"] = "vllm"
    """The rollout engine: vLLM; SGLang (it has run on CPUs only); or `hf`, a
    slow reference built on transformers that runs on any device."""
    exact: Annotated[bool, Affects.EXECUTION] = False
    """With `hf`: draw every token from the trainer's own forward pass (kernels, attention, packing, head), so
    that the sampled log-probs are the trained model's; costs a forward pass over each response and more."""
    n: Annotated[int, Affects.RESPONSES] = Field(default=1, ge=1)
    """Responses to each prompt."""
    max_tokens: Annotated[int, Affects.RESPONSES] = Field(default=512, ge=1)
    """Longest response in tokens; of an episode, all that follows its prompt."""
    environment: EnvironmentSection | None = None
    """The environment that the policy acts in over several turns; by default it answers once."""
    agent: AgentSection | None = None
    """A program of your own that calls the policy through an OpenAI endpoint, in place of an environment."""
    temperature: Annotated[float, Affects.RESPONSES] = Field(default=1.0, ge=COLDEST)
    """Sampling temperature."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the most likely tokens whose probabilities add up to this value."""
    top_k: int = Field(default=-1, ge=-1)
    """Sample from this many most likely tokens; -1 for all."""
    staleness: int = Field(default=0, ge=0)
    """How many weight versions behind the trained model responses may be; 0 is on-policy."""
    in_flight: bool = False
    """Update weights while responses are generated, which go on with the new weights; needs `staleness` above
    0, and `vllm` or `hf`."""
    engines: Annotated[int | None, Affects.EXECUTION] = Field(default=None, ge=1)
    """Generation engines; by default `device.ranks` / `tensor_parallel`. With `cluster.placement: separate`
    as many as fit on the devices that the ranks leave free, or one on CPUs."""
    tensor_parallel: Annotated[int, Affects.EXECUTION] = Field(default=1, ge=1)
    """Devices per engine."""
    memory_utilization: Annotated[float, Affects.EXECUTION] = Field(default=0.5, gt=0, le=1)
    """Fraction of device memory for the engine's weights and KV cache."""
    kv_cache_gb: Annotated[float, Affects.EXECUTION] = Field(default=2.0, gt=0)
    """Size of the KV cache in GiB if the engine keeps it in host memory."""
    eager: Annotated[bool | None, Affects.EXECUTION] = None
    """Run the engine without compilation or graph capture: fast start, slow steps; by default only on CPU."""
    engine_options: Annotated[dict[str, Any], Affects.EXECUTION] = Field(default={})
    """Further options of vLLM for memory and speed, such as `max_num_seqs`; docs/rollout.md lists them."""
    load_format: Annotated[Literal["dummy", "safetensors"], Affects.EXECUTION] = "dummy"
    """What vLLM starts with: random weights, as the trained ones follow before it generates, or the model's
    files. Pickled files are never read."""
    server_python: Annotated[str | None, Affects.EXECUTION] = None
    """With `sglang`: the Python of the environment it is installed in; by default the trainer's."""
    weight_transfer: Annotated[Literal["auto", "file"], Affects.EXECUTION] = "auto"
    """How weights reach the engines: `auto` sends them from device to device where that works, `file` always
    goes through files in shared memory."""
    update_timeout: Annotated[float, Affects.EXECUTION] = Field(default=300.0, gt=0)
    """Timeout of a weight update in seconds, plus 10 s for each GB of weights; the run stops if an update
    takes longer."""
    weight_check_tolerance: Annotated[float | None, Affects.EXECUTION] = Field(default=None, gt=0)
    """Largest mean difference between the engine's and the trained model's log-probs after a weight update;
    the default depends on `model.dtype`, on the first update, and on how far the trained model has moved
    since then."""
    record: Annotated[bool, Affects.EXECUTION] = False
    """Write all trajectories to Parquet in the run directory."""
    replay: Annotated[str | None, Affects.SOURCE] = None
    """Train on the recorded trajectories of this run directory instead of new responses, for `isotrain parity
    replay`. No engine and no reward worker starts, and there is no validation."""
    validation: ValidationSection = ValidationSection()
    """How responses to validation prompts are sampled."""

    @property
    def episodes(self) -> EnvironmentSection | AgentSection | None:
        """Whoever plays episodes with the policy; None where it answers once."""
        return self.environment or self.agent

    @property
    def generates(self) -> bool:
        """Whether engines generate responses."""
        return self.replay is None

    @property
    def takes_from_devices(self) -> bool:
        """Whether its engines can take weights from device to device; SGLang's server takes files."""
        return self.generates and self.engine != "sglang" and self.weight_transfer == "auto"

    def engine_count(self, ranks: int, placement: str, free: int = 0) -> int:
        """How many engines there are; `free` devices are left by the ranks, where these are not shared."""
        if self.engines is not None:
            return self.engines
        return max(1, (ranks if placement == "colocated" else free) // self.tensor_parallel)


class Gsm8kSection(Section):
    method: Literal["strict", "flexible"] = "strict"
    """`strict` needs the final answer after `####`, `flexible` takes the last number."""
    format_score: float = 0.0
    """Score of a response in the right format with a wrong answer."""
    weight: float = 1.0
    """Weight of this reward in the sum."""


class MathSection(Section):
    processes: Annotated[int | None, Affects.EXECUTION] = Field(default=None, ge=1)
    """Maximum processes per worker; by default one per core, at most 8."""
    weight: float = 1.0
    """Weight of this reward in the sum."""


class ChoiceSection(Section):
    weight: float = 1.0
    """Weight of this reward in the sum."""


class CodeSection(Section):
    sandbox: Annotated[str, Affects.EXECUTION] = Field(
        default="bubblewrap",
        pattern=r"^(bubblewrap|https?://[^\s/@?#:]+(:\d{1,5})?(/[^\s?#]*)?)$",
    )
    """Where code runs: `bubblewrap`, or the address of a SandboxFusion server as `http://host:port`."""
    python: Annotated[str | None, Affects.EXECUTION] = None
    """With `bubblewrap`: the Python that runs the code, with the packages of its environment; by default that
    of isotrain, without the packages of its virtual environment, or else `/usr/bin/python3`."""
    score: Literal["all", "share"] = "all"
    """`all`: 1 if all tests pass, otherwise 0; `share`: the share of tests that pass."""
    timeout: Annotated[float, Affects.COURSE] = Field(default=10.0, gt=0)
    """Time limit of one program in seconds, in place of `reward.timeout`; ten times that for all tests of a
    response. A test that exceeds it has failed, and so have those after it."""
    memory_gb: Annotated[float, Affects.COURSE] = Field(default=1.0, ge=0.0625)
    """Memory limit of one program in GiB."""
    processes: Annotated[int | None, Affects.EXECUTION] = Field(default=None, ge=1)
    """Programs that run at the same time per worker; by default one per core, at most 8."""
    weight: float = 1.0
    """Weight of this reward in the sum."""


class FunctionSection(Section):
    path: str = Field(pattern=r"^[^:\x00]+\.py:[A-Za-z_]\w*$")
    """A Python file and a function in it, `rewards.py:score`; it may be async."""
    concurrency: Annotated[int | None, Affects.EXECUTION] = Field(default=None, ge=1)
    """Concurrent calls per worker: an async function runs them in one process, by default 16; any other
    function in one process each, by default one per core, at most 8."""
    start_timeout: Annotated[float, Affects.EXECUTION] = Field(default=120.0, gt=0)
    """Timeout of the import of the file, in seconds."""
    memory_gb: Annotated[float | None, Affects.COURSE] = Field(default=None, gt=0)
    """Maximum address space of one process in GiB; by default there is no limit."""
    environment: Annotated[list[str], Affects.EXECUTION] = Field(default=[])
    """Environment variables with keys or tokens that the function may see, such as `JUDGE_API_KEY`."""
    weight: float = 1.0
    """Weight of this reward in the sum."""


class RewardPluginSection(PluginSection):
    concurrency: Annotated[int | None, Affects.EXECUTION] = Field(default=None, ge=1)
    """Concurrent calls per worker, as for `reward.function`."""
    start_timeout: Annotated[float, Affects.EXECUTION] = Field(default=120.0, gt=0)
    """Timeout of the import of the package, in seconds."""
    memory_gb: Annotated[float | None, Affects.COURSE] = Field(default=None, gt=0)
    """Maximum address space of one process in GiB; by default there is no limit."""
    environment: Annotated[list[str], Affects.EXECUTION] = Field(default=[])
    """Environment variables that it needs, as for `reward.function`."""
    weight: float = 1.0
    """Weight of this reward in the sum."""


class RewardModelSection(Section):
    path: str
    """A Hugging Face directory of a sequence classifier with one label."""
    weight: float = 1.0
    """Weight of this reward in the sum."""


class ProcessRewardSection(Section):
    path: str
    """A model directory, as `isotrain export` writes it after `algorithm.name: prm`: a language model or a
    token classifier with two labels; its tokenizer must be the policy's."""
    step_separator: str = "\n"
    """Text that ends each step of a response."""
    good_token: str = "+"
    """The token for a correct step, if the model is a language model."""
    bad_token: str = "-"
    """The token for a wrong step, if the model is a language model."""
    aggregate: Literal["min", "mean", "product", "last"] = "min"
    """How step scores become the score of the response; a response without steps scores 0."""
    weight: float = 1.0
    """Weight of this reward in the sum."""


class RewardSection(Section):
    gsm8k: Gsm8kSection | None = None
    """Compare GSM8K's final answers as text."""
    math: MathSection | None = None
    """Compare final answers as mathematics, with math-verify."""
    choice: ChoiceSection | None = None
    """Compare the letter of a multiple-choice answer; the row has a letter, or a number from 0."""
    code: CodeSection | None = None
    """Run the response's last code block against the row's tests, in a sandbox."""
    function: FunctionSection | None = None
    """Your own reward function."""
    model: RewardModelSection | None = None
    """A reward model."""
    process: ProcessRewardSection | None = None
    """A process reward model, which scores the steps of responses."""
    plugin: RewardPluginSection | None = None
    """A reward from an installed package."""
    environment: EnvironmentRewardSection | None = None
    """The reward that the environment or the agent gives (`rollout.environment`, `rollout.agent`)."""
    answer_key: str = "reward_model.ground_truth"
    """Column of the reference answer; a dotted path reaches into structures."""
    timeout: Annotated[float, Affects.COURSE] = Field(default=10.0, gt=0)
    """Timeout of a call in seconds; the sample then gets `failed_score`."""
    failed_score: float = 0.0
    """Score of a sample whose reward could not be computed."""
    workers: Annotated[int, Affects.EXECUTION] = Field(default=1, ge=1)
    """Processes that compute rewards."""

    @model_validator(mode="after")
    def _one_at_least(self) -> RewardSection:
        names = ("gsm8k", "math", "choice", "code", "function", "plugin", "model", "process", "environment")
        if not any(getattr(self, name) for name in names):
            raise ValueError(
                tr("no reward is set; add one of {names}, such as gsm8k: {{}}", names=", ".join(names))
            )
        return self

    @property
    def reward_models(self) -> dict[str, float]:
        """The rewards that models on the training ranks compute, with their weights."""
        weights = {
            "model": None if self.model is None else self.model.weight,
            "process": None if self.process is None else self.process.weight,
        }
        return {name: weight for name, weight in weights.items() if weight is not None}


class ClusterSection(Section):
    affects: ClassVar[Affects] = Affects.EXECUTION

    address: str = Field(default="auto", pattern=r"^(auto|local|[^/\s]+:\d+)$")
    """A running Ray cluster as host:port, `local` for a private one, `auto` to join one or else start one."""
    placement: Literal["colocated", "separate"] = "colocated"
    """`colocated`: rollout and training share devices. `separate`: each has its own."""
    allow_unauthenticated: bool = False
    """Allow a multi-node cluster that accepts unauthenticated requests."""
    offload: bool = True
    """Move idle models to host memory, on devices with memory of their own."""
    start_timeout: float = Field(default=600.0, gt=0)
    """Timeout for devices and engines at the start, in seconds; a second more for each 100 MB of models."""
