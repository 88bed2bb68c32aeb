"""Build training and inference models from the recipe's sections on models and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard
from transformers import PreTrainedModel

from isotrain.data.pictures import PictureProcessor
from isotrain.device.base import Device, FusedOperators
from isotrain.device.cpu import Cpu
from isotrain.engine.engine import InferenceModel, LossScale, TrainingEngine
from isotrain.engine.muon import make_muon
from isotrain.engine.optimizer import make_optimizer
from isotrain.engine.world import World
from isotrain.errors import ModelError
from isotrain.models.attention import guard_flash, provide
from isotrain.models.config import (
    attention_cap,
    attention_shapes,
    has_window,
    layer_kinds,
    number_of_experts,
    text_config,
)
from isotrain.models.context import CONTEXT, head_ranks
from isotrain.models.conversion import stored_buffers
from isotrain.models.experts import RouterBalance, provide_experts, use_grouped, uses_grouped
from isotrain.models.files import model_directory
from isotrain.models.fused import LAYERS, NONE_FUSED, Fused, fuse_layers
from isotrain.models.layers import checkpoint_layers, compile_layers
from isotrain.models.load import (
    build_causal_lm,
    build_scalar,
    build_token_classifier,
    layers_of,
    materialise,
    move_buffers,
    read_config,
)
from isotrain.models.lora import add_adapters, base_name, initialise_adapters, is_adapter, lora_config
from isotrain.models.mixers import KIND, mixers_of
from isotrain.models.packed import SCORE, SCORE_BIAS, Backbone, PackedModel, ScalarModel
from isotrain.models.vision import Vision, refuse_unsupported, sees
from isotrain.models.weights import WeightFiles, load_weights, perturb, shard_of, source_parts
from isotrain.recipe.schema import LoraSection, ModelSection, OffloadSection, OptimizerSection

if TYPE_CHECKING:
    from peft import LoraConfig


# Larger chunks sum the head's gradient fewer times. About three such tensors exist at one time.
LOGIT_BYTES = 256 << 20


# Names of what machines wait for, the same on all ranks, which build models in the same order.
_loaded = count()

Load = Callable[[Backbone, ModelSection, World, Path], dict[str, nn.Parameter]]
"""From a model on the meta device and its directory to its placed parameters, by Hugging Face name."""


def from_disk(
    packed: Backbone, model: ModelSection, world: World, directory: Path
) -> dict[str, nn.Parameter]:
    """Shard a model, give it memory and load its weights; a classifier's head that the files lack is 0."""
    named, files = place(packed, model, world), WeightFiles(directory)
    loaded = {base_name(name): p for name, p in named.items() if not is_adapter(name)}
    if SCORE not in files.file_of:
        for name in {SCORE, SCORE_BIAS} & set(loaded):
            with torch.no_grad():
                shard_of(loaded.pop(name)).local.zero_()
    tensors = {**loaded, **stored_buffers(packed.pretrained)}
    _read_once(packed.pretrained, tensors, files, world)
    load_weights(packed.pretrained, tensors, files)
    if model.perturbation:
        perturb(loaded.items(), model.perturbation)
    return named


def _read_once(
    model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], files: WeightFiles, world: World
) -> None:
    """One rank of each machine reads for all of them, the others from what the system has cached of it."""
    if world.local_size < 2:
        return

    def work() -> bool:
        if world.local_rank == 0:
            first = world.rank - world.local_rank
            ranks = range(first, first + world.local_size)
            with suppress(OSError, ModelError):  # loading says the same, on the ranks that need that part
                files.read_ahead(source_parts(model, tensors, files, ranks))
        return True

    world.machine_first(f"weights-{next(_loaded)}", work)


def build_engine(
    model: ModelSection,
    optimizer: OptimizerSection,
    *,
    device: Device,
    world: World,
    seed: int,
    load: Load = from_disk,
) -> TrainingEngine:
    """The policy: a causal model sharded over the world, its weights loaded, ready to train."""
    directory = model_directory(model.path)
    packed = _causal_model(directory, model, device, world)
    if model.lora.rank:
        add_adapters(packed.pretrained, adapter_config(model.lora), frozen_dtype=_dtype(model))
    elif packed.vision is not None and model.vision == "frozen":
        for parameter in packed.vision.tower.parameters():
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(_dtype(model))
    _prepare_layers(packed, model)
    named = load(packed, model, world, directory)
    if model.router_aux_loss is not None:
        packed.balance = RouterBalance(packed.pretrained, model.router_aux_loss)
    initialise_adapters([(name, p) for name, p in named.items() if is_adapter(name)], seed)
    return _engine(packed, model, optimizer, device, world)


def build_critic(
    model: ModelSection,
    optimizer: OptimizerSection,
    *,
    path: str | None,
    device: Device,
    world: World,
    load: Load = from_disk,
) -> TrainingEngine:
    """A scalar model of which all weights train; without a head in the files, its first values are 0."""
    directory = model_directory(path, "algorithm.critic.path") if path else model_directory(model.path)
    critic = _scalar_model(directory, model, device, world)
    _prepare_layers(critic, model)
    load(critic, model, world, directory)
    return _engine(critic, model, optimizer, device, world)


def build_step_classifier(
    model: ModelSection,
    optimizer: OptimizerSection,
    *,
    device: Device,
    world: World,
    load: Load = from_disk,
) -> TrainingEngine:
    """A token classifier of bad and good steps that trains all weights; a new head starts undecided."""
    directory = model_directory(model.path)
    classifier = _step_model(directory, model, device, world)
    _prepare_layers(classifier, model)
    load(classifier, model, world, directory)
    return _engine(classifier, model, optimizer, device, world)


def build_reference(
    model: ModelSection, *, device: Device, world: World, load: Load = from_disk
) -> InferenceModel:
    """The policy as it was before training, frozen."""
    directory = model_directory(model.path)
    return _frozen(_causal_model(directory, model, device, world), model, world, directory, load)


def build_alone(model: ModelSection, *, device: Device) -> InferenceModel:
    """The policy as ranks compute it, frozen, in a process that has no other ranks."""
    no_mesh = cast(DeviceMesh, None)  # nothing is split
    world = World(0, 1, 0, device.activate(0), no_mesh)
    return build_reference(model.model_copy(update={"offload": OffloadSection()}), device=device, world=world)


def build_reward_model(path: str, model: ModelSection, *, device: Device, world: World) -> InferenceModel:
    """A trained scalar model, frozen; `model` says how it is computed."""
    directory = model_directory(path, "reward.model.path")
    scalar, files = _scalar_model(directory, model, device, world), WeightFiles(directory)
    if SCORE not in files.file_of:
        raise ModelError(
            f"reward.model.path: '{path}' has no '{SCORE}'; set a sequence classifier with one label"
        )
    if files.shape(SCORE)[0] != 1:
        raise ModelError(
            f"reward.model.path: '{path}' has {files.shape(SCORE)[0]} labels; "
            "set a sequence classifier with one label"
        )
    return _frozen(scalar, model, world, directory)


def build_process_reward_model(
    path: str, model: ModelSection, *, device: Device, world: World
) -> InferenceModel:
    """A trained scorer of steps, frozen: a token classifier, or a language model with two label tokens."""
    directory = model_directory(path, "reward.process.path")
    files = WeightFiles(directory)
    scorer: Backbone
    if SCORE not in files.file_of:
        scorer = _causal_model(directory, model, device, world)
    elif files.shape(SCORE)[0] == 2:
        scorer = _step_model(directory, model, device, world)
    else:
        raise ModelError(
            f"reward.process.path: '{path}' has {files.shape(SCORE)[0]} labels; set a token classifier "
            "with two, or a language model"
        )
    return _frozen(scorer, model, world, directory)


def _causal_model(directory: Path, model: ModelSection, device: Device, world: World) -> PackedModel:
    causal_lm, attention, fused = _pretrained(build_causal_lm, directory, model, device, world)
    vocabulary = causal_lm.get_output_embeddings().weight.shape[0]
    chunk = model.logits_chunk or max(1, LOGIT_BYTES // (4 * vocabulary))
    packed = PackedModel(causal_lm, attention, chunk, fused, head_float32=model.head_dtype == "float32")
    if sees(causal_lm.config):
        refuse_unsupported(
            causal_lm,
            device__mesh__context=world.context > 1,
            model__compile=model.compile,
            model__fused=model.fused == "on",
            model__offload__weights=model.offload.weights,
        )
        processor = PictureProcessor.of_model(directory)
        packed.vision = Vision(causal_lm, torch.from_numpy(processor.table_CV), *processor.shape)
    return packed


def _scalar_model(directory: Path, model: ModelSection, device: Device, world: World) -> ScalarModel:
    return ScalarModel(*_pretrained(build_scalar, directory, model, device, world))


def _step_model(directory: Path, model: ModelSection, device: Device, world: World) -> ScalarModel:
    return ScalarModel(*_pretrained(build_token_classifier, directory, model, device, world))


def _pretrained(
    build: Callable[[Path, str, str], PreTrainedModel],
    directory: Path,
    model: ModelSection,
    device: Device,
    world: World,
) -> tuple[PreTrainedModel, str, Fused]:
    """A model, its attention, and its fused operators."""
    attention = choose_attention(directory, model, device, world.context)
    if attention == "flash":
        guard_flash(windows=device.flash_window)
    experts = device.experts if model.experts == "auto" else model.experts
    table = None if sees(read_config(directory)) else fused_operators(model, device)
    if table is None:
        return build(directory, attention, experts), attention, NONE_FUSED
    provide(table.attention)
    provide_experts(table.grouped_matmul)
    pretrained = build(directory, attention, experts)
    if model.experts == "auto":
        use_grouped(pretrained)
    fused = fuse_layers(pretrained, table)
    if model.fused == "on" and (fused.unknown or fused.operators != LAYERS):
        missing = ", ".join(name for name in LAYERS if name not in fused.operators) or "none"
        raise ModelError(
            f"model.fused: some layers of '{pretrained.config.model_type}' are not supported "
            f"(missing: {missing}; unknown: {', '.join(fused.unknown) or 'none'}); use auto"
        )
    if attention in ("fused", "fused-padded"):
        fused = replace(fused, operators=("attention", *fused.operators))
    if uses_grouped(pretrained):
        fused = replace(fused, operators=(*fused.operators, "experts"))
    return pretrained, attention, fused


def fused_operators(model: ModelSection, device: Device) -> FusedOperators | None:
    """The device's table of fused operators, if it has one and the recipe allows it."""
    if model.fused == "on" and device.fused_operators is None:
        raise ModelError(f"model.fused: '{device.type}' has no fused operators; use auto or off")
    return None if model.fused == "off" else device.fused_operators


def choose_attention(directory: Path, model: ModelSection, device: Device, context: int = 1) -> str:
    """The kind of attention of a model: as the recipe says, or the best that device and model allow."""
    if context > 1 and model.attention in ("flash", "padded"):
        raise ModelError(
            f"model.attention: '{model.attention}' cannot be split over ranks (device.mesh.context is "
            f"{context}); use auto or sdpa"
        )
    config = read_config(directory)
    has_windows, has_cap = has_window(config), attention_cap(config) is not None
    is_hybrid = KIND in layer_kinds(config)
    if not sees(config) and fused_operators(model, device) is not None and not has_windows and not has_cap:
        if model.attention == "auto":
            return "fused"
        # Padding is for unusual models: fused attention there must be chosen explicitly.
        if model.attention == "padded" and model.fused == "on":
            return "fused-padded"
    # The flash kernels have no float32, and on some devices transformers' do not pass a window on.
    windowed = has_windows and not device.flash_window
    if model.attention == "auto":
        flash = device.flash_attention and model.dtype != "float32" and not windowed and not has_cap
        return "flash" if flash and not is_hybrid and context == 1 else "sdpa"
    if model.attention == "flash" and not device.flash_attention:
        raise ModelError(f"model.attention: '{device.type}' has no flash attention here; use auto or sdpa")
    if model.attention == "flash" and windowed:
        raise ModelError(
            f"model.attention: flash attention on '{device.type}' ignores this model's sliding window; "
            "use auto or sdpa"
        )
    return model.attention


def _dtype(model: ModelSection) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, model.dtype)
    return dtype


def _frozen(
    packed: Backbone, model: ModelSection, world: World, directory: Path, load: Load = from_disk
) -> InferenceModel:
    dtype = _dtype(model)
    for parameter in packed.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(dtype)
    load(packed, model, world, directory)
    return InferenceModel(packed, world)


def _prepare_layers(packed: Backbone, model: ModelSection) -> None:
    """Compile and checkpoint the layers of a model that trains, as the recipe says."""
    if model.compile:
        compile_layers(packed.pretrained)
    if model.gradient_checkpointing:
        checkpoint_layers(packed.pretrained, offload=model.offload.activations)


def _weights_on_host(model: ModelSection, world: World) -> bool:
    """Whether weights are on the host until a layer computes; a CPU has no other memory."""
    return model.offload.weights and world.device.type != "cpu"


def place(packed: Backbone, model: ModelSection, world: World) -> dict[str, nn.Parameter]:
    """Shard a model on the meta device and give it memory; its empty parameters by Hugging Face name."""
    mesh = world.shape
    if mesh.context > 1:
        split_context(packed, world)
    move_buffers(packed, world.device)
    if mesh.expert > 1:
        split_experts(packed.pretrained, world.expert_mesh["expert"])
    on_host = _weights_on_host(model, world)
    shard_model(packed, world, _dtype(model), on_host=on_host)
    materialise(packed, torch.device("cpu") if on_host else world.device)
    packed.pretrained.tie_weights()  # giving memory to meta parameters makes two of a shared one
    return {name.removeprefix(packed.prefix): p for name, p in packed.named_parameters()}


def split_context(packed: Backbone, world: World) -> None:
    """Have the ranks of a context group compute each micro-batch together."""
    config, mesh = packed.pretrained.config, world.shape
    if mixers_of(packed.pretrained):
        raise ModelError(
            f"device.mesh.context: recurrent layers of model type '{config.model_type}' need all tokens of a "
            "sample on one rank; set it to 1"
        )
    shapes = {(shape.query_heads, shape.key_heads) for shape in attention_shapes(config)}
    if len(shapes) > 1:
        raise ModelError(
            f"device.mesh.context: layers of model type '{config.model_type}' differ in their numbers of "
            "heads; set it to 1"
        )
    heads = head_ranks(mesh.context, *shapes.pop(), mesh.context_attention)
    packed.context = world.context_group(heads)
    packed.pretrained.set_attn_implementation(CONTEXT)
    # transformers only warns, and each rank would be by itself
    if text_config(config)._attn_implementation != CONTEXT:
        raise ModelError(
            f"device.mesh.context: attention of model type '{config.model_type}' cannot be split; set it to 1"
        )


def _engine(
    packed: Backbone, model: ModelSection, optimizer: OptimizerSection, device: Device, world: World
) -> TrainingEngine:
    make = partial(make_muon, muon=optimizer.muon) if optimizer.name == "muon" else make_optimizer
    made = make(
        packed,
        betas=optimizer.betas,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        fused=Cpu.fused_adamw if _weights_on_host(model, world) else device.fused_adamw,
        state_dtype=getattr(torch, optimizer.state_dtype),
        moments_on_host=model.offload.optimizer and world.device.type != "cpu",
    )
    scale = LossScale() if model.dtype == "float16" else None
    return TrainingEngine(packed, made, world, optimizer.max_grad_norm, scale)


def adapter_config(lora: LoraSection) -> LoraConfig:
    return lora_config(lora.rank, lora.alpha, lora.targets, lora.dropout)


def shard_model(model: Backbone, world: World, dtype: torch.dtype, *, on_host: bool) -> None:
    """Shard each layer, then the rest; gradients are summed over ranks in float32, never averaged.

    Losses are shares of a global mean already (see `algorithms.sft`): averaging would divide twice.
    """
    if world.size == 1 and all(p.dtype == dtype for p in model.parameters()) and not on_host:
        return  # nothing to split and nothing to cast: FSDP would only copy every weight and gradient
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    # A tower's blocks get rotations in float32, which a cast would round.
    seeing = replace(policy, cast_forward_inputs=False)
    place = CPUOffloadPolicy() if on_host else OffloadPolicy()
    pretrained = model.pretrained
    tower = set() if model.vision is None else set(model.vision.tower.modules())
    # A frozen tower is whole on every rank: one without a picture need not take part.
    whole = set(model.vision.tower.parameters()) if model.vision and not model.vision.trained else set()
    layers = [layer for layer in layers_of(pretrained) if not (whole and layer in tower)]
    if not layers:
        raise ModelError(f"cannot tell the layers of {type(pretrained).__name__} apart to shard them")
    experts = list(split_modules(pretrained))
    for module in [*experts, *layers, model]:
        own_policy = seeing if module in tower else policy
        if world.size == 1 and not on_host:
            # A single rank gathers nothing: freeing and refilling weights would only cost copies.
            options: dict[str, Any] = {"reshard_after_forward": False, "ignored_params": whole}
            fully_shard(module, mesh=world.mesh, mp_policy=own_policy, **options)
            continue
        mesh = world.expert_mesh["expert_shard"] if module in experts else world.mesh
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=own_policy,
            offload_policy=place,
            ignored_params=whole,
            reshard_after_forward=module is not model,
            shard_placement_fn=split_dimension(mesh),
        )
        sharded = cast(FSDPModule, module)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


def split_dimension(mesh: DeviceMesh) -> Callable[[nn.Parameter], Shard | None]:
    """Which dimension of a parameter is split over the last one of a mesh; None is the first.

    FSDP pads rows to the number of shards: 128 experts on 1,024 ranks would take eight times their memory. A
    parameter with fewer rows than shards is split along another dimension, which FSDP can only do evenly.
    """
    shards = mesh.shape[-1]

    def dimension(parameter: nn.Parameter) -> Shard | None:
        # A rank has only some rows of split experts: those are sharded.
        shape = shard_of(parameter.detach()).local.shape
        if shape[0] >= shards:
            return None
        even = (number for number, size in enumerate(shape) if number and size % shards == 0)
        return next((Shard(number) for number in even), None)

    return dimension


DISPATCH = "ep_dispatch_experts"


def split_experts(pretrained: PreTrainedModel, ranks: DeviceMesh) -> None:
    """Give each rank of a group its own experts; the model is still on the meta device."""
    kind, experts = pretrained.config.model_type, number_of_experts(pretrained.config)
    plan: dict[str, str] = getattr(pretrained, "ep_plan", None) or {}
    if DISPATCH not in plan.values():
        raise ModelError(
            f"device.mesh.expert: transformers {transformers.__version__} cannot split the experts of model "
            f"type '{kind}'; set it to 1"
        )
    if experts % ranks.size():
        raise ModelError(
            f"device.mesh.expert: {experts} experts cannot be divided by {ranks.size()}; set a divisor"
        )
    from transformers.distributed.tensor_parallel import apply_expert_parallelism

    # Without tensor parallelism, there is no mesh of it.
    apply_expert_parallelism(pretrained, ranks, None, plan)  # type: ignore[arg-type]


def split_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Modules whose experts are split over ranks."""
    return (module for module in model.modules() if getattr(module, "_is_expert_parallel", False))
