"""The typed, frozen recipe that users write; the only place where defaults live."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from isotrain.language import listed, tr
from isotrain.recipe.data import DataSection, picture_rules
from isotrain.recipe.online import ClusterSection, Online, OnlineSection, RewardSection, RolloutSection
from isotrain.recipe.preference import DpoSection, Preference, RmSection
from isotrain.recipe.rules import broken_rules
from isotrain.recipe.section import Affects, DefaultFor, OfflineSection, Section

SCHEMES = ("s3", "gs", "gcs", "az", "abfs", "abfss", "oss", "hdfs", "file", "memory")
_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=-]*")


def storage_url_problem(url: str) -> str | None:
    """Problem with a storage URL. The URL is not repeated: it may hold a password."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in SCHEMES:
        return tr(
            "is not a URL of a known store; use one of: {schemes}",
            schemes=", ".join(f"{s}://" for s in SCHEMES),
        )
    if "@" in rest or "?" in rest or "#" in rest or urlsplit(url).password:
        return tr(
            "has credentials or parameters in it; give them by the store's environment variables or files"
        )
    segments = rest.strip("/").split("/")
    if scheme == "hdfs":
        segments[0] = re.sub(r":[0-9]{1,5}$", "", segments[0])
    if not all(_SEGMENT.fullmatch(segment) for segment in segments):
        return tr(
            "has a part that is empty, begins with a dot or has unusual characters; use letters and digits"
        )
    return None


ONLINE = "online algorithms"
Decay = Annotated[float, Field(ge=0, lt=1)]


class MeshSection(Section):
    affects: ClassVar[Affects] = Affects.EXECUTION

    replicas: int = Field(default=1, ge=1)
    """Copies of the weights. Each is sharded over `ranks / replicas` neighbouring ranks; gradients are summed
    over the copies. More copies need more memory per device, and less traffic between machines."""
    context: int = Field(default=1, ge=1)
    """Neighbouring ranks that compute each micro-batch together, each a part of its tokens. A micro-batch
    then needs that much less memory per device."""
    context_attention: Literal["auto", "ulysses", "ring"] = "auto"
    """How those ranks compute attention: `ulysses` splits heads, `ring` passes keys and values around,
    `auto` splits the heads as far as their number allows and forms rings of the rest."""

    expert: int = Field(default=1, ge=1)
    """Neighbouring ranks over which the experts of each layer of a mixture are divided. Tokens travel to the
    experts that they chose, instead of all experts to all ranks."""

    @property
    def is_used(self) -> bool:
        return self.context > 1 or self.replicas > 1 or self.expert > 1

    def problem(self, ranks: int) -> str | None:
        """Why so many ranks do not form this mesh."""
        if ranks % (self.replicas * self.context):
            return tr(
                "device.ranks ({ranks}) cannot be divided by device.mesh.replicas ({replicas}) times "
                "device.mesh.context ({context}): change one of the three",
                ranks=ranks,
                replicas=self.replicas,
                context=self.context,
            )
        if ranks % self.expert:
            return tr(
                "device.ranks ({ranks}) cannot be divided by device.mesh.expert ({expert}): change "
                "one of the two",
                ranks=ranks,
                expert=self.expert,
            )
        if self.expert > 1 and self.replicas > 1:
            return tr(
                "device.mesh.expert ({expert}) cannot be used with device.mesh.replicas ({replicas}): "
                "set one of them to 1",
                expert=self.expert,
                replicas=self.replicas,
            )
        return None


class DeviceSection(Section):
    affects: ClassVar[Affects] = Affects.EXECUTION

    type: str = "auto"
    """Device to train on: `auto` takes the best one that is present."""
    ranks: int = Field(default=1, ge=1)
    """Training processes, one device each. Online algorithms count them over all machines of the Ray cluster.
    Under `torchrun`, its world size is used instead."""
    mesh: MeshSection = MeshSection()
    """How the ranks divide the work; by default each has its own micro-batches and a shard of the weights."""
    determinism: Literal["off", "on", "strict"] = "off"
    """Make results identical from run to run, at some cost in speed: `on` uses deterministic kernels,
    `strict` also stops the run at an operator that has none."""
    peak_tflops: float | None = Field(default=None, gt=0)
    """Peak dense TFLOPS of one device in `model.dtype`, for `perf/mfu`; by default from a built-in table."""

    @model_validator(mode="after")
    def _ranks_form_the_mesh(self) -> DeviceSection:
        problem = self.mesh.problem(self.ranks)
        if problem and self.ranks > 1:  # one may be torchrun's, which sets another number
            raise ValueError(problem)
        return self


class OffloadSection(Section):
    affects: ClassVar[Affects] = Affects.EXECUTION

    weights: bool = False
    """Keep weights, gradients and moments in host memory (FSDP2's `CPUOffloadPolicy`): each layer's
    weights come to the device when it computes, and the host updates them. Also of a reference and others."""
    optimizer: bool = False
    """Keep the optimizer's moments in host memory; for an update they come to the device, some at a time."""
    activations: bool = False
    """Keep the inputs of layers, which `gradient_checkpointing` saves, in host memory until the backward."""


class LoraSection(Section):
    rank: int = Field(default=0, ge=0)
    """Rank of the adapters; 0 trains all weights."""
    alpha: int = Field(default=16, ge=1)
    """Adapter outputs are scaled by `alpha / rank`."""
    targets: Literal["all-linear"] | list[str] = "all-linear"
    """`all-linear` (every linear layer but the head; of a mixture of experts, attention's), or module names
    such as `[q_proj, v_proj]`."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout before the adapters."""


class ModelSection(Section):
    path: str
    """A local Hugging Face model directory, or a Hub name; `name@revision` is a commit, tag or branch."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Compute type; trained weights, moments and gradient sums are float32. `float16` scales the loss."""
    head_dtype: Literal["model", "float32"] = "model"
    """Compute type of the language-model head, in training and in rollout engines: as `dtype`, or float32."""
    attention: Annotated[Literal["auto", "flash", "sdpa", "padded"], Affects.EXECUTION] = "auto"
    """Attention over packed samples: `flash` kernels, `sdpa` (exact SDPA per sample), or `padded`."""
    fused: Annotated[Literal["auto", "off", "on"], Affects.EXECUTION] = "auto"
    """Fused operators (other rounding): `auto` where they fit, `on` or an error. Not verified on hardware."""
    experts: Annotated[Literal["auto", "eager", "grouped_mm", "batched_mm"], Affects.EXECUTION] = "auto"
    """transformers' implementation of a mixture's experts; `auto` takes the device's."""
    router_aux_loss: float | None = Field(default=None, gt=0)
    """Weight of the load-balancing loss of a mixture's routers (`router_aux_loss_coef` in transformers)."""
    gradient_checkpointing: Annotated[bool, Affects.EXECUTION] = True
    """Recompute each layer in the backward pass instead of keeping its activations."""
    offload: OffloadSection = OffloadSection()
    """What is in host memory while the device does not need it; no effect where the device is the host."""
    compile: Annotated[bool, Affects.EXECUTION] = False
    """Compile each layer with `torch.compile`, apart from attention and experts (other rounding)."""
    logits_chunk: Annotated[int | None, Affects.EXECUTION] = Field(default=None, ge=1)
    """Tokens whose logits are in memory at the same time; the default fills 256 MiB of float32."""
    lora: LoraSection = LoraSection()
    """Low-rank adapters."""
    vision: Literal["train", "frozen"] = "train"
    """Whether the vision tower of a vision-language model is trained; with `lora` it never is."""
    perturbation: int = Field(default=0, ge=0)
    """For `isotrain parity`: a seed that moves each weight by one unit in the last place; 0 moves none."""

    @model_validator(mode="after")
    def _layers_are_checkpointed(self) -> ModelSection:
        if self.offload.activations and not self.gradient_checkpointing:
            raise ValueError(
                tr("offload.activations needs gradient_checkpointing: remove one of the two settings")
            )
        return self


class SftSection(OfflineSection):
    name: Literal["sft"]
    """Supervised fine-tuning: cross-entropy over the tokens the assistant wrote."""


Algorithm = SftSection | Preference | Online


class MuonSection(Section):
    lr_ratio: float = Field(default=1.0, gt=0)
    """Learning rate of Muon's matrices as a multiple of `optimizer.lr`, which all other weights have."""
    momentum: Decay = 0.95
    """Decay of the momentum."""
    nesterov: bool = True
    """Nesterov momentum."""
    ns_steps: int = Field(default=5, ge=1, le=99)
    """Newton-Schulz iterations, in bfloat16."""
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Scale of the update of a matrix with A rows and B columns: `match_rms_adamw` is `0.2 sqrt(max(A, B))`,
    which suits learning rates and weight decays of AdamW (Moonlight), `original` is `sqrt(max(1, A / B))`."""


class OptimizerSection(Section):
    name: Literal["adamw", "muon"] = "adamw"
    """`muon` orthogonalises the momentum of the layers' matrices, each expert's by itself; embeddings, heads,
    norms, biases and convolutions stay with AdamW. Muon has one moment where AdamW has two."""
    muon: MuonSection = MuonSection()
    """Settings of Muon; without effect with `adamw`."""
    lr: Annotated[float, DefaultFor(ONLINE, 1e-6)] = Field(default=1e-5, ge=0)
    """Peak learning rate."""
    betas: Annotated[tuple[Decay, Decay], DefaultFor(ONLINE, (0.9, 0.999))] = (0.9, 0.95)
    """Decay of AdamW's first and second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to AdamW's denominator."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay; biases and norms are not decayed."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which moments are kept; `bfloat16` halves their memory, with stochastic rounding."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Largest global gradient norm; 0 disables clipping."""
    schedule: Annotated[Literal["cosine", "linear", "constant"], DefaultFor(ONLINE, "constant")] = "cosine"
    """How the learning rate decays after the warm-up."""
    warmup_ratio: Annotated[float, DefaultFor(ONLINE, 0.0)] = Field(default=0.1, ge=0, le=1)
    """Fraction of all steps over which the learning rate rises from 0."""
    warmup_steps: int | None = Field(default=None, ge=0)
    """The same as a number of steps; `warmup_ratio` is ignored when it is given."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """The schedule ends at this fraction of `lr`."""


class TrainerSection(Section):
    affects: ClassVar[Affects] = Affects.COURSE

    epochs: int = Field(default=1, ge=1)
    """Passes over the training rows; ignored when `steps` is given."""
    steps: int | None = Field(default=None, ge=1)
    """Optimizer steps to train for."""
    validate_every: int = Field(default=0, ge=0)
    """Steps between validations; 0 validates at the end only."""
    validate_first: bool = False
    """Validate before the first step too; the results are the metrics of step 0."""
    save_every: Annotated[int | None, Affects.EXECUTION] = Field(default=None, ge=0)
    """Steps between checkpoints; 0 saves at the end only. By default a checkpoint follows the first step that
    ends 10 minutes or more after the last one, less often if saving takes more than 5 % of the time."""
    keep_checkpoints: Annotated[int, Affects.EXECUTION] = Field(default=3, ge=1)
    """How many of the newest checkpoints to keep."""
    checkpoint_storage: Annotated[str | None, Affects.EXECUTION] = None
    """URL of an object store, such as `s3://bucket/my-run`, that gets a copy of each checkpoint. A run whose
    local checkpoints are lost, older or damaged resumes from there. No credentials in the URL: the store's
    package finds them in the environment. Needs `isotrain[storage]` and that package, such as s3fs."""
    resume: Annotated[Literal["auto", "never", "start_over"], Affects.EXECUTION] = "auto"
    """`auto` resumes from the newest valid checkpoint in `output`, and stops if the saved ones are lost;
    `never` refuses a used directory; `start_over` moves what is in it to `earlier-N` and starts from the
    first step: give it on the command line, once."""
    follow_links: Annotated[bool, Affects.EXECUTION] = False
    """Allow links in `output` that lead out of it, such as `checkpoints` on another disk. Without it they are
    refused: in a directory from somebody else they could lead to any of your files."""
    preemption_seconds: Annotated[float, Affects.EXECUTION] = Field(default=25.0, ge=1)
    """Time limit after SIGTERM: the run saves a checkpoint after the current step and ends, or ends without
    one if the step takes too long. Set it below the scheduler's own limit."""
    non_finite: Literal["raise", "skip"] = "raise"
    """What to do if a loss or gradient is not finite: stop, or skip the update of that step."""
    max_skipped_steps: int = Field(default=10, ge=1)
    """With `non_finite: skip`, the run stops after this many skipped updates."""

    @field_validator("checkpoint_storage")
    @classmethod
    def _is_a_plain_url(cls, url: str | None) -> str | None:
        if url is not None and (problem := storage_url_problem(url)):
            raise ValueError(problem)
        return url


class ProfileSection(Section):
    affects: ClassVar[Affects] = Affects.EXECUTION

    steps: list[Annotated[int, Field(ge=1)]] = Field(default=[], max_length=16)
    """Steps in which to record who did what when, such as `[3, 4]`; `isotrain profile` reads it."""
    trace: bool = True
    """Also write torch's trace of these steps' operators on each training rank, which makes them slower."""


class ObserveSection(Section):
    affects: ClassVar[Affects] = Affects.EXECUTION

    loggers: list[Literal["console", "tensorboard", "wandb", "swanlab", "mlflow"]] = Field(
        default=["console"]
    )
    """Where metrics go besides `metrics.jsonl`, which is always written."""
    project: str = "isotrain"
    """Project name, for trackers that have projects."""
    layer_trace: int = Field(default=0, ge=0)
    """Record the layers of this many first steps, for `isotrain parity`."""
    layer_trace_after: int = Field(default=0, ge=0)
    """Record the steps after this one instead, starting from its checkpoint in `output`, and end with them;
    `isotrain parity probe` sets it."""
    operators: bool = False
    """Compare every operator of the first step with float64, for `isotrain parity`; that step is slow."""
    truth: bool = False
    """Compute the first step in float64 on the host, record it and end; `isotrain parity truth` sets it."""
    model_digest: bool = False
    """Record the SHA-256 of the model's files, which certificates need; with `layer_trace` it always is."""
    profile: ProfileSection = ProfileSection()
    """Where the time of some steps goes."""

    @property
    def probes(self) -> str | None:
        """Which function makes the probes of a run, if there are any.

        A name and no import: training does not know its auditors, and ranks get the recipe as text.
        """
        asked = self.layer_trace or self.operators or self.truth
        return "isotrain.tools.probes:make_probes" if asked else None

    def last_step(self, steps: int) -> int:
        """Last of `steps` steps: a probe ends with the steps that it records."""
        if self.truth:
            return min(steps, self.layer_trace_after + 1)
        return min(steps, self.layer_trace_after + self.layer_trace) if self.layer_trace_after else steps

    @model_validator(mode="after")
    def _traces_something(self) -> ObserveSection:
        if self.layer_trace_after and not self.layer_trace:
            raise ValueError(
                tr("layer_trace_after needs layer_trace: the number of steps to record after it")
            )
        return self


class Recipe(Section):
    name: Annotated[str, Affects.EXECUTION] = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")
    """Name of the run in trackers and file names."""
    output: Annotated[str, Affects.EXECUTION]
    """Run directory: recipe, metrics, checkpoints, plots."""
    seed: Annotated[int, Affects.RESPONSES] = Field(default=42, ge=0, lt=2**32)
    """Seed of data order, adapter initialisation and dropout."""
    device: DeviceSection = DeviceSection()
    """The device to train on."""
    model: ModelSection
    """The model to train."""
    data: DataSection
    """The data to train on."""
    algorithm: Algorithm = Field(discriminator="name")
    """The algorithm to train with."""
    rollout: RolloutSection | None = None
    """How online algorithms sample responses."""
    reward: RewardSection | None = None
    """How responses are scored."""
    cluster: ClusterSection | None = None
    """Where online algorithms run."""
    optimizer: OptimizerSection = OptimizerSection()
    """The optimizer and its schedule."""
    trainer: TrainerSection = TrainerSection()
    """Length of the run, validation, checkpoints, failures."""
    observe: ObserveSection = ObserveSection()
    """Metrics and loggers."""

    @model_validator(mode="after")
    def _defaults(self) -> Recipe:
        if isinstance(self.algorithm, OnlineSection):
            self.__dict__.update(optimizer=self.optimizer.for_case(ONLINE))
        return self

    @model_validator(mode="after")
    def _online_sections(self) -> Recipe:
        name = self.algorithm.name
        for section, purpose in self.algorithm.needs.items():
            if getattr(self, section) is None:
                raise ValueError(
                    tr(
                        "{section} is missing; {name} needs it {purpose}",
                        section=section,
                        name=name,
                        purpose=purpose,
                    )
                )
        for section, reason in self.algorithm.refuses.items():
            if getattr(self, section) is not None:
                raise ValueError(
                    tr(
                        "{section} cannot be used with {name}, which {reason}; remove it",
                        section=section,
                        name=name,
                        reason=reason,
                    )
                )
        return self

    @model_validator(mode="after")
    def _online_sections_fit(self) -> Recipe:
        algorithm, rollout, reward = self.algorithm, self.rollout, self.reward
        if isinstance(algorithm, OnlineSection) and rollout is not None and reward is not None:
            problems = broken_rules(
                algorithm,
                rollout,
                reward,
                self.cluster or ClusterSection(),
                ranks=self.device.ranks,
                batch_size=self.data.batch_size,
                max_prompt=self.data.max_length,
                token_budget=self.data.tokens_per_micro_batch,
                other_layers="lora" if self.model.lora.rank else "compile" if self.model.compile else None,
            )
            if text := listed(problems, "\n"):
                raise ValueError(text)
        return self

    @model_validator(mode="after")
    def _pictures_fit(self) -> Recipe:
        if text := listed(picture_rules(self), "\n"):
            raise ValueError(text)
        return self

    @model_validator(mode="after")
    def _cuts_fit(self) -> Recipe:
        """Responses are cut at their end only."""
        side = self.data.too_long
        if side in ("truncate-left", "truncate-middle") and not isinstance(self.algorithm, OnlineSection):
            raise ValueError(
                tr(
                    "data.too_long: {side} is for prompts of online algorithms: use error, truncate or drop",
                    side=side,
                )
            )
        return self

    @model_validator(mode="after")
    def _matrices_are_trained(self) -> Recipe:
        if self.optimizer.name == "muon" and self.model.lora.rank:
            raise ValueError(
                tr(
                    "optimizer.name: muon updates whole weight matrices, and model.lora trains adapters of "
                    "them: use adamw, or set model.lora.rank to 0"
                )
            )
        return self

    @model_validator(mode="after")
    def _layers_are_whole(self) -> Recipe:
        observe = self.observe
        traced = "layer_trace" if observe.layer_trace else "operators" if observe.operators else None
        if traced and self.device.mesh.is_used:
            raise ValueError(
                tr(
                    "observe.{traced} records whole micro-batches and shards over all ranks: remove it, "
                    "or set device.mesh.context, device.mesh.replicas and device.mesh.expert to 1",
                    traced=traced,
                )
            )
        return self

    @model_validator(mode="after")
    def _budget_holds_a_pair(self) -> Recipe:
        """Both samples of a pair go into one micro-batch."""
        data, longest = self.data, 2 * self.data.max_length
        if isinstance(self.algorithm, DpoSection | RmSection) and data.tokens_per_micro_batch < longest:
            raise ValueError(
                tr(
                    "data.tokens_per_micro_batch ({tokens_per_micro_batch}) must hold a pair, twice "
                    "data.max_length: raise it to at least {longest}",
                    tokens_per_micro_batch=data.tokens_per_micro_batch,
                    longest=longest,
                )
            )
        return self
