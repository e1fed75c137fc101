"""Vision transformers against transformers', on the same weights: CLIP, SigLIP, DINOv2, InternViT, Pixtral, and who has
them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import nn
from transformers.models.pixtral import modeling_pixtral

import jaxenc
from jaxenc.layers.parameters import flatten
from tests import equality
from tests.parity import vit_checkpoints as tiny
from tests.parity.checkpoints import Checkpoint
from tests.parity.compare import (
    assert_avoided,
    assert_bfloat16_as_good,
    assert_float32_equal,
    max_error,
)
from tests.parity.gradients import assert_slopes_equal, slopes
from tests.parity.references import Encoded, resample_bicubic, resample_taps, use_activation, use_epsilon
from tests.parity.vit_originals import KINDS, Alter, Item, Original, encoder_of, pixels_of, pixtral_rotary

SIZES = tiny.VitSizes()
# larger than the position table of 5 x 5, smaller, its own size, and neither square
GRIDS = [(5, 5), (7, 3), (2, 4), (8, 9)]


@dataclass(frozen=True)
class Model:
    """What there is to be tested of a model.

    Attributes:
        kind: its original.
        make: its checkpoint.
        items: its pictures.
        activation: the name of its blocks' activation.
        norms: ends of the names of its norms, and the `eps` of all of them.
        eps: see `norms`.
        others: another eps.
    """

    kind: str
    make: Callable[..., Checkpoint]
    items: list[Item]
    activation: str
    norms: tuple[str, ...]
    eps: float
    others: float


CLIP_NORMS = ("layer_norm1", "layer_norm2", "pre_layrnorm")
SIGLIP_NORMS = ("layer_norm1", "layer_norm2")
DINOV2_NORMS = ("norm1", "norm2", "layernorm")
INTERN_NORMS = ("layernorm_before", "layernorm_after")
# heads that no mesh here divides
INTERN_6B = tiny.VitSizes(heads=5, head_dim=8)
PIXTRAL_NORMS = ("attention_norm", "ffn_norm", "ln_pre")
DINOV2_PICTURES = PIXTRAL_PICTURES = tiny.pictures_of(GRIDS, patch=14)
# rows and columns that are merged two by two; of a picture that gives one row, the original takes it for a vector
MISTRAL3_PICTURES = tiny.pictures_of([(4, 6), (8, 10), (10, 2), (2, 4)], patch=14)
MODELS = {
    "clip": Model("clip", tiny.clip, tiny.pictures(SIZES), "quick_gelu", CLIP_NORMS, 1e-5, 1e-6),
    "llava": Model("llava", tiny.llava, tiny.pictures(SIZES), "quick_gelu", CLIP_NORMS, 1e-5, 1e-6),
    "siglip": Model(
        "siglip", tiny.siglip, tiny.pictures(SIZES), "gelu_pytorch_tanh", (*SIGLIP_NORMS, "post_layernorm"), 1e-6, 1e-5
    ),
    "siglip without head": Model(
        "siglip",
        partial(tiny.siglip, head=False),
        tiny.pictures(SIZES),
        "gelu_pytorch_tanh",
        (*SIGLIP_NORMS, "post_layernorm"),
        1e-6,
        1e-5,
    ),
    "paligemma": Model(
        "paligemma",
        tiny.paligemma,
        tiny.pictures(SIZES),
        "gelu_pytorch_tanh",
        (*SIGLIP_NORMS, "post_layernorm"),
        1e-6,
        1e-5,
    ),
    "llava of siglip": Model(
        "llava",
        partial(tiny.llava, tower="siglip"),
        tiny.pictures(SIZES),
        "gelu_pytorch_tanh",
        SIGLIP_NORMS,
        1e-6,
        1e-5,
    ),
    "siglip2": Model(
        "siglip2",
        tiny.siglip2,
        tiny.pictures_of(GRIDS, patch=14),
        "gelu_pytorch_tanh",
        (*SIGLIP_NORMS, "post_layernorm"),
        1e-6,
        1e-5,
    ),
    "dinov2": Model("dinov2", tiny.dinov2, DINOV2_PICTURES, "gelu", DINOV2_NORMS, 1e-6, 1e-5),
    "dinov2 giant": Model(
        "dinov2", partial(tiny.dinov2, gated=True), DINOV2_PICTURES, "silu", DINOV2_NORMS, 1e-6, 1e-5
    ),
    "internvl": Model("internvl", tiny.internvit, tiny.tiles(SIZES), "gelu", INTERN_NORMS, 1e-6, 1e-5),
    "internvl 6b": Model(
        "internvl",
        partial(tiny.internvit, INTERN_6B, big=True),
        tiny.tiles(SIZES),
        "gelu",
        INTERN_NORMS,
        1e-6,
        1e-5,
    ),
    "internvit": Model(
        "internvit", partial(tiny.internvit, alone=True), tiny.tiles(SIZES), "gelu", INTERN_NORMS, 1e-6, 1e-5
    ),
    "internvit 6b": Model(
        "internvit",
        partial(tiny.internvit, INTERN_6B, big=True, alone=True),
        tiny.tiles(SIZES),
        "gelu",
        INTERN_NORMS,
        1e-6,
        1e-5,
    ),
    "pixtral": Model("pixtral in llava", tiny.pixtral, PIXTRAL_PICTURES, "silu", PIXTRAL_NORMS, 1e-5, 1e-6),
    "mistral3": Model(
        "mistral3",
        partial(tiny.pixtral, projector="mistral3"),
        MISTRAL3_PICTURES,
        "silu",
        PIXTRAL_NORMS,
        1e-5,
        1e-6,
    ),
    "pixtral alone": Model(
        "pixtral", partial(tiny.pixtral, projector=None), PIXTRAL_PICTURES, "silu", PIXTRAL_NORMS, 1e-5, 1e-6
    ),
}
every_pixtral = pytest.mark.parametrize("subject", ["pixtral", "mistral3", "pixtral alone"], indirect=True)
every_model = pytest.mark.parametrize("subject", MODELS, indirect=True)


class Subject:
    """One model: the original and its checkpoint, ours, and what both give for the same pictures."""

    def __init__(self, name: str, folder: Path):
        self.model = MODELS[name]
        self.folder, self.items = folder, self.model.items
        self.checkpoint = self.model.make()
        self.original = Original(KINDS[self.model.kind], self.checkpoint)
        self.truth: Encoded = self.original.run(self.items)
        self.checkpoint.write(folder)
        self.encoder = jaxenc.load(folder, dtype="float32")
        self.rows = encode(self.encoder, self.items)

    def avoids(self, mistake: Alter, *, on: slice = slice(None)) -> None:
        """Asserts that rows are right, and that every picture would show the mistake."""
        mistaken = self.original.run(self.items[on], alter=mistake).rows
        assert_avoided(self.rows[on], self.truth.rows[on], mistaken)

    def tower(self, model: nn.Module) -> nn.Module:
        return self.original.kind.tower(model)

    @property
    def layout(self) -> str:
        return self.original.kind.layout

    def tensors_of(self, params: Any) -> dict[str, np.ndarray]:
        """Parameters as the file's tensors, in the layout that is nearest to the original's."""
        mappings = self.encoder.config.mappings()
        mapping = mappings.get(self.layout, mappings["original"]).located(self.original.tensors)
        return dict(mapping.export(flatten(jax.tree.map(np.asarray, params))))


def encode(encoder: jaxenc.Encoder, items: list[Item]) -> list[np.ndarray]:
    return encoder.encode_items([jaxenc.VisionItem(*item) for item in items])


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Subject]:
    return cache(lambda name: Subject(name, tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def subject(request: pytest.FixtureRequest, subjects: Callable[[str], Subject]) -> Subject:
    return subjects(request.param)


# Numbers


@every_model
def test_float32_rows_are_the_originals(subject: Subject) -> None:
    # the truth is what transformers computes in float32
    assert max_error(subject.original.run(subject.items, dtype="float32").rows, subject.truth.rows) < 3e-6
    assert_float32_equal(subject.rows, subject.truth.rows)


@every_model
def test_every_block_is_the_originals(subject: Subject) -> None:
    encoder = subject.encoder
    batch = encoder.pack([jaxenc.VisionItem(*item) for item in subject.items])
    _, captured = encoder.apply(encoder.params, batch, capture="all")
    assert len(captured) == encoder.config.transformer.layers
    for block, tokens in captured.items():
        expected = [hidden[block + 1] for hidden in subject.truth.hidden]
        assert_float32_equal(encoder.unpack_tokens(tokens, batch), expected)


@every_model
def test_bfloat16_is_as_good_as_the_originals(subject: Subject) -> None:
    rows = encode(jaxenc.load(subject.folder, dtype="bfloat16"), subject.items)
    original = subject.original.run(subject.items, dtype="bfloat16").rows
    assert_bfloat16_as_good(rows, original, subject.truth.rows)


@pytest.mark.parametrize(
    "subject",
    ["llava", "siglip", "dinov2 giant", "internvl", "internvl 6b", "pixtral", "mistral3"],
    indirect=True,
)
def test_gradients_are_the_originals_and_go_back_to_its_names(subject: Subject) -> None:
    encoder, items = subject.encoder, subject.items
    rng = np.random.default_rng(5)
    weights = [rng.standard_normal(rows.shape) for rows in subject.truth.rows]
    ours = subject.tensors_of(slopes(encoder, [jaxenc.VisionItem(*item) for item in items], weights))
    assert len(ours) >= 9 * encoder.config.transformer.layers
    assert_slopes_equal(ours, subject.original.gradients(items, weights))


# Layouts and meshes


@every_model
def test_every_layout_of_the_file_gives_the_same_rows(subject: Subject, tmp_path: Path) -> None:
    for layout in subject.checkpoint.tensors:
        for config in subject.checkpoint.configs:
            folder = subject.checkpoint.write(
                tmp_path / layout / config, layout=layout, config=config, dtype="float32", shards=1
            )
            encoder = jaxenc.load(folder, dtype="float32")
            assert encoder.config == subject.encoder.config
            for one, other in zip(*map(jax.tree.leaves, (encoder.params, subject.encoder.params)), strict=True):
                np.testing.assert_array_equal(one, other)


@every_model
def test_what_transformers_saves_is_read(subject: Subject, tmp_path: Path) -> None:
    subject.original.model("float32").save_pretrained(tmp_path)
    encoder = jaxenc.load(tmp_path, dtype="float32")
    assert encoder.config == subject.encoder.config
    for one, other in zip(*map(jax.tree.leaves, (encoder.params, subject.encoder.params)), strict=True):
        np.testing.assert_array_equal(one, other)


@every_model
def test_parameters_go_back_to_the_tensors_of_the_file(subject: Subject) -> None:
    tensors, back = subject.original.tensors, subject.tensors_of(subject.encoder.params)
    for name, value in back.items():
        np.testing.assert_array_equal(value, tensors[name], err_msg=name)
    # LLaVA takes the output of the block before the last, and from there neither norm is used
    unused = ("encoder.layers.2." if subject.model.make is tiny.llava else "post_layernorm", "post_layernorm")
    assert all(any(part in name for part in unused) for name in tensors.keys() - back.keys())


@pytest.mark.parametrize(
    ("shape", "strategy"), [((1, 3), {"attention": "pad", "mlp": "pad"}), ((2, 4), "tensor"), ((2, 4), "data")], ids=str
)
@pytest.mark.parametrize(
    "subject",
    ["llava", "siglip", "paligemma", "dinov2 giant", "internvl", "internvit", "pixtral", "mistral3"],
    indirect=True,
)
def test_rows_are_the_same_on_a_mesh(subject: Subject, shape: tuple[int, int], strategy: Any) -> None:
    assert_same_on_a_mesh(subject, shape, strategy)


@pytest.mark.parametrize(
    ("shape", "strategy"),
    [
        ((1, 5), {"attention": "tensor", "mlp": "pad"}),
        ((1, 3), {"attention": "pad", "mlp": "pad"}),
        ((2, 4), {"attention": "pad", "mlp": "pad"}),
        ((2, 4), "data"),
    ],
    ids=str,
)
def test_rows_of_five_normalised_heads_are_the_same_on_a_mesh(
    subjects: Callable[[str], Subject], shape: tuple[int, int], strategy: Any
) -> None:
    # 5 divide over 5 devices; 6 and 8 heads are normalised as 5 are
    assert_same_on_a_mesh(subjects("internvl 6b"), shape, strategy)


def assert_same_on_a_mesh(subject: Subject, shape: tuple[int, int], strategy: Any) -> None:
    mesh = jaxenc.make_mesh(data=shape[0], model=shape[1])
    encoder = jaxenc.load(subject.folder, mesh=mesh, dtype="float32", strategy=strategy)
    tokens = sum(sum(encoder.config.pieces(jaxenc.VisionItem(*item))) for item in subject.items)
    # the last has whole pictures in it, and pictures that are spread over rows
    *_, (_, single) = equality.layouts(encoder, tokens, encoder.config.window or 32)
    assert_float32_equal(encode(single, subject.items), subject.rows)


# Traps


@every_model
def test_epsilon_is_the_published_one(subject: Subject, tmp_path: Path) -> None:
    # activations of a standard deviation of about sqrt(1e-5) or less reach every norm
    eps = subject.model.eps
    faint = ("embedding", "cls_token", "pre_layrnorm", "out_proj", "output.dense", "projection_layer", "fc2")
    faint += ("weights_out", "patch_conv", "ln_pre", "o_proj", "down_proj")
    checkpoint = subject.model.make(scales=dict.fromkeys(faint, eps**0.5))
    original = Original(subject.original.kind, checkpoint)
    rows = encode(jaxenc.load(checkpoint.write(tmp_path), dtype="float32"), subject.items)
    truth = original.run(subject.items).rows
    for part in subject.model.norms:

        def mistake(model: nn.Module, part: str = part) -> None:
            for name, module in subject.tower(model).named_modules():
                if name.endswith(part):
                    use_epsilon(module, eps=subject.model.others)

        assert_avoided(rows, truth, original.run(subject.items, alter=mistake).rows)


@every_model
def test_blocks_have_the_published_activation(subject: Subject) -> None:
    def mistake(name: str) -> Alter:
        def alter(model: nn.Module) -> None:
            encoder = encoder_of(subject.tower(model))
            use_activation(encoder, name=name)
            for part in encoder.modules():
                if hasattr(part, "act_fn"):
                    part.act_fn = torch.nn.GELU()

        return alter

    for name in {"gelu", "gelu_pytorch_tanh", "quick_gelu"} - {subject.model.activation}:
        subject.avoids(mistake(name))


@pytest.mark.parametrize("subject", ["clip", "llava", "dinov2", "internvl"], indirect=True)
def test_the_class_token_has_the_first_position(subject: Subject) -> None:
    def last(model: nn.Module) -> None:
        embeddings = subject.tower(model).embeddings
        if hasattr(embeddings, "position_embedding"):
            embeddings.position_embedding.weight.data = embeddings.position_embedding.weight.data.roll(-1, 0)
        else:
            embeddings.position_embeddings.data = embeddings.position_embeddings.data.roll(-1, 1)

    subject.avoids(last)


@every_model
def test_pictures_do_not_attend_to_each_other(subject: Subject) -> None:
    assert_float32_equal(encode(subject.encoder, subject.items[1:2]), subject.truth.rows[1:2])


@pytest.mark.parametrize("subject", ["clip", "llava"], indirect=True)
def test_what_enters_clips_blocks_is_normalised(subject: Subject) -> None:
    subject.avoids(lambda model: setattr(subject.tower(model), "pre_layrnorm", nn.Identity()))


def test_clips_rows_are_all_tokens_of_the_last_block_not_normalised(subjects: Callable[[str], Subject]) -> None:
    clip = subjects("clip")
    assert [rows.shape for rows in clip.rows] == [(17, SIZES.embed)] * 3
    assert_float32_equal(clip.rows, [hidden[-1] for hidden in clip.truth.hidden])


def test_llavas_rows_are_the_patches_of_the_block_before_the_last(subjects: Callable[[str], Subject]) -> None:
    llava = subjects("llava")
    assert llava.encoder.config.transformer.layers == SIZES.layers - 1
    assert [rows.shape for rows in llava.rows] == [(16, SIZES.text)] * 3
    for layer in (-1, -3):
        llava.avoids(lambda model, layer=layer: setattr(model.config, "vision_feature_layer", layer))
    full = llava.original.run(
        llava.items, alter=lambda model: setattr(model.config, "vision_feature_select_strategy", "full")
    )
    assert_float32_equal(llava.rows, [rows[1:] for rows in full.rows])


def test_llavas_projector_has_the_erf_gelu(subjects: Callable[[str], Subject]) -> None:
    subjects("llava").avoids(lambda model: use_activation(model.multi_modal_projector, name="gelu_pytorch_tanh"))


def test_siglips_rows_are_normalised_but_in_a_llava(subjects: Callable[[str], Subject]) -> None:
    for name, normalised in (("siglip without head", True), ("paligemma", True), ("llava of siglip", False)):
        subject = subjects(name)
        assert len(subject.rows[0]) == 16
        assert subject.encoder.config.final_norm == normalised

    def without(model: nn.Module) -> None:
        model.post_layernorm = nn.Identity()

    subjects("siglip without head").avoids(without)


def test_siglips_head_comes_before_its_patches(subjects: Callable[[str], Subject]) -> None:
    head, patches = subjects("siglip"), subjects("siglip without head")
    assert [len(rows) for rows in head.rows] == [17] * 3
    assert_float32_equal([rows[1:] for rows in head.rows], patches.truth.rows)


def test_siglips_head_adds_its_mlp_to_what_is_not_normalised(subjects: Callable[[str], Subject]) -> None:
    siglip = subjects("siglip")

    def mistake(model: nn.Module) -> None:
        attention, mlp, norm = model.head.attention, model.head.mlp, model.head.layernorm

        def pooled(x: torch.Tensor) -> torch.Tensor:
            y = norm(attention(model.head.probe.expand(len(x), -1, -1), x, x)[0])
            return (y + mlp(y))[:, 0]

        model.head.forward = pooled

    mistaken = siglip.original.run(siglip.items, alter=mistake).rows
    assert_avoided(*([rows[:1] for rows in encoded] for encoded in (siglip.rows, siglip.truth.rows, mistaken)))


@pytest.mark.parametrize("subject", ["dinov2", "dinov2 giant"], indirect=True)
def test_what_dinov2s_blocks_add_is_scaled(subject: Subject) -> None:
    for part in ("layer_scale1", "layer_scale2"):

        def unscaled(model: nn.Module, part: str = part) -> None:
            for block in model.encoder.layer:
                setattr(block, part, nn.Identity())

        subject.avoids(unscaled)


def test_dinov2_gates_with_the_first_half(subjects: Callable[[str], Subject]) -> None:
    def swapped(model: nn.Module) -> None:
        for block in model.encoder.layer:
            block.mlp.gate_proj, block.mlp.up_proj = block.mlp.up_proj, block.mlp.gate_proj

    subjects("dinov2 giant").avoids(swapped)


@pytest.mark.parametrize(
    "resample",
    [
        partial(resample_taps, a=-0.5),
        partial(resample_taps, align_corners=True),
        partial(resample_bicubic, antialias=True),
    ],
    ids=["a = -0.5", "corners aligned", "antialiased"],
)
def test_dinov2_resizes_positions_with_torchs_bicubic(subjects: Callable[[str], Subject], resample: Any) -> None:
    def mistake(model: nn.Module) -> None:
        def resized(_: torch.Tensor, height: int, width: int) -> torch.Tensor:
            table = model.embeddings.position_embeddings
            patches = resample(table[0, 1:].reshape(5, 5, -1), height // 14, width // 14)
            return torch.cat([table[:, :1], patches[None]], dim=1)

        model.embeddings.interpolate_pos_encoding = resized

    # antialiasing only matters where the table shrinks: 2 x 4 and 7 x 3
    subjects("dinov2").avoids(mistake, on=slice(1, 3))


@pytest.mark.parametrize(
    ("mode", "antialias", "on"),
    # without antialiasing only a table that shrinks is another: 2 x 4 and 7 x 3
    [("bilinear", False, slice(1, 3)), ("bicubic", True, slice(1, 4))],
    ids=["not antialiased", "bicubic"],
)
def test_siglip2_resizes_positions_bilinearly_and_antialiased(
    subjects: Callable[[str], Subject], mode: str, antialias: bool, on: slice
) -> None:
    def mistake(model: nn.Module) -> None:
        def resized(table: torch.Tensor, shapes: torch.Tensor, max_length: int) -> torch.Tensor:
            image = table.permute(2, 0, 1)[None]
            image = nn.functional.interpolate(image, size=tuple(shapes[0]), mode=mode, antialias=antialias)
            return image[0].flatten(1).T[None]

        model.embeddings.resize_positional_embeddings = resized

    subjects("siglip2").avoids(mistake, on=on)


def test_positions_of_dinov2s_own_grid_are_added_as_they_are(subjects: Callable[[str], Subject]) -> None:
    assert GRIDS[0] == (5, 5)
    dinov2 = subjects("dinov2")
    table = dinov2.checkpoint.tensors["original"]["embeddings.position_embeddings"]

    def added(model: nn.Module) -> None:
        model.embeddings.interpolate_pos_encoding = lambda *_: torch.from_numpy(table).double()

    assert_float32_equal(dinov2.rows[:1], dinov2.original.run(dinov2.items[:1], alter=added).rows)


@pytest.mark.parametrize("subject", ["internvl", "internvl 6b"], indirect=True)
def test_what_internvits_blocks_add_is_scaled(subject: Subject) -> None:
    for part in ("lambda_1", "lambda_2"):

        def unscaled(model: nn.Module, part: str = part) -> None:
            for block in subject.tower(model).encoder.layer:
                torch.nn.init.ones_(getattr(block, part))

        subject.avoids(unscaled)


def test_internvit_normalises_queries_and_keys_over_all_heads(subjects: Callable[[str], Subject]) -> None:
    internvl = subjects("internvl 6b")

    class OfEachHead(nn.Module):
        def __init__(self, norm: nn.Module):
            super().__init__()
            self.norm = norm

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = x.unflatten(-1, (INTERN_6B.heads, -1))
            mean = heads.pow(2).mean(-1, keepdim=True)
            return self.norm.weight * (heads * torch.rsqrt(mean + self.norm.variance_epsilon)).flatten(-2)

    for part in ("q_norm", "k_norm"):
        for other in (OfEachHead, nn.Identity):

            def mistake(model: nn.Module, part: str = part, other: Any = other) -> None:
                for block in model.vision_tower.encoder.layer:
                    setattr(block.attention, part, other(getattr(block.attention, part)))

            internvl.avoids(mistake)


def test_epsilon_of_internvits_queries_and_keys_is_the_published_one(
    subjects: Callable[[str], Subject], tmp_path: Path
) -> None:
    internvl = subjects("internvl 6b")
    checkpoint = internvl.model.make(scales={"q_proj": 1e-3, "k_proj": 1e-3})
    original = Original(internvl.original.kind, checkpoint)
    rows = encode(jaxenc.load(checkpoint.write(tmp_path), dtype="float32"), internvl.items)
    truth = original.run(internvl.items).rows
    for part in ("q_norm", "k_norm"):

        def mistake(model: nn.Module, part: str = part) -> None:
            for block in model.vision_tower.encoder.layer:
                use_epsilon(getattr(block.attention, part), eps=1e-5)

        assert_avoided(rows, truth, original.run(internvl.items, alter=mistake).rows)


def test_epsilon_of_internvls_projector_is_the_published_one(
    subjects: Callable[[str], Subject], tmp_path: Path
) -> None:
    internvl = subjects("internvl")
    # 0.003 is the square root of 1e-5
    checkpoint = internvl.model.make(scales=dict.fromkeys(("embeddings.", "attention.projection_layer", "fc2"), 3e-3))
    original = Original(internvl.original.kind, checkpoint)
    rows = encode(jaxenc.load(checkpoint.write(tmp_path), dtype="float32"), internvl.items)
    mistaken = original.run(internvl.items, alter=lambda model: use_epsilon(model.multi_modal_projector, eps=1e-6))
    assert_avoided(rows, original.run(internvl.items).rows, mistaken.rows)


def test_internvls_projector_has_the_erf_gelu(subjects: Callable[[str], Subject]) -> None:
    subjects("internvl").avoids(lambda model: use_activation(model.multi_modal_projector, name="gelu_pytorch_tanh"))


# of group's row, row in it, group's column, column in it; right would be (0, 1, 3, 2, 4, 5)
@pytest.mark.parametrize(
    "order",
    [(0, 3, 1, 2, 4, 5), (0, 1, 3, 4, 2, 5)],
    ids=["groups transposed, as in v1", "columns of a group first"],
)
def test_a_row_of_internvl_is_a_group_of_patches_in_raster_order(
    subjects: Callable[[str], Subject], order: tuple[int, ...]
) -> None:
    def shuffled(x: torch.Tensor, scale_factor: float = 0.5) -> torch.Tensor:
        n, rows, columns, d = x.shape
        groups = x.reshape(n, rows // 2, 2, columns // 2, 2, d)
        return groups.permute(*order).reshape(n, rows // 2, columns // 2, 4 * d)

    subjects("internvl").avoids(lambda model: setattr(model, "pixel_shuffle", shuffled))


def test_rows_of_internvl_are_the_patches_without_the_class_token(subjects: Callable[[str], Subject]) -> None:
    internvl = subjects("internvl")
    assert [rows.shape for rows in internvl.rows] == [(12, SIZES.text), (4, SIZES.text), (8, SIZES.text)]

    def first_kept(model: nn.Module) -> None:
        model.vision_tower.register_forward_hook(
            lambda _, __, out: out | {"last_hidden_state": out.last_hidden_state.roll(1, 1)}
        )

    internvl.avoids(first_kept)


def test_internvits_rows_are_not_normalised(subjects: Callable[[str], Subject]) -> None:
    def normalised(model: nn.Module) -> None:
        model.layernorm = nn.LayerNorm(SIZES.embed, dtype=torch.float64)

    internvit = subjects("internvit")
    assert [rows.shape for rows in internvit.rows] == [(51, SIZES.embed), (17, SIZES.embed), (34, SIZES.embed)]
    internvit.avoids(normalised)


@pytest.mark.parametrize("subject", ["internvl", "internvl 6b", "internvit"], indirect=True)
def test_tiles_do_not_attend_to_each_other(subject: Subject) -> None:
    (patches, grid), *_ = subject.items
    tiles = [(tile, (1, *grid[1:])) for tile in np.split(patches, grid[0])]
    assert_float32_equal([np.concatenate(encode(subject.encoder, tiles))], subject.truth.rows[:1])


def test_pixtrals_files_of_mistral_are_read_with_their_own_config(
    subjects: Callable[[str], Subject], tmp_path: Path
) -> None:
    for name in ("pixtral", "mistral3"):
        subject = subjects(name)
        folder = subject.checkpoint.write(tmp_path / name, layout="mistral", config="params", shards=1)
        (folder / "config.json").rename(folder / "params.json")
        (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
        encoder = jaxenc.load(folder, dtype="float32")
        assert encoder.config == subject.encoder.config
        assert_float32_equal(encode(encoder, subject.items), subject.truth.rows)


@every_pixtral
@pytest.mark.parametrize("mistake", [{"order": "xy"}, {"shared": True}], ids=str)
def test_pixtrals_rows_turn_the_first_half_of_the_pairs_and_every_other_frequency(
    subject: Subject, mistake: dict[str, Any]
) -> None:
    def alter(model: nn.Module) -> None:
        rotary = subject.tower(model).patch_positional_embedding
        rotary.forward = lambda _, yx: pixtral_rotary(yx, head_dim=SIZES.head_dim, **mistake)

    subject.avoids(alter)


@every_pixtral
def test_pixtrals_rotary_pairs_are_halves(subject: Subject) -> None:
    def adjacent(model: nn.Module) -> None:
        for block in subject.tower(model).transformer.layers:
            for layer in (block.attention.q_proj, block.attention.k_proj):
                pairs = layer.weight.data.reshape(SIZES.heads, SIZES.head_dim // 2, 2, -1)
                layer.weight.data = pairs.swapaxes(1, 2).reshape(layer.weight.shape)

    subject.avoids(adjacent)


@pytest.mark.parametrize("subject", ["pixtral", "mistral3"], indirect=True)
def test_pixtrals_rows_are_those_of_the_last_block_not_normalised(subject: Subject) -> None:
    def normalised(model: nn.Module) -> None:
        norm, projector = subject.tower(model).ln_pre, model.multi_modal_projector
        projector.register_forward_pre_hook(lambda _, given: (norm(given[0]), *given[1:]))

    subject.avoids(normalised)


def test_pixtrals_pictures_of_one_call_do_not_attend_to_each_other(
    subjects: Callable[[str], Subject], monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = subjects("pixtral alone")
    # two pictures of one call, which the original packs into one sequence
    model, (wide, tall) = subject.original.model("float64"), subject.items[2:]
    pixels = torch.zeros(2, 3, 8 * 14, 9 * 14, dtype=torch.float64)
    pixels[0, :, : 2 * 14, : 4 * 14], pixels[1] = pixels_of(*wide)[0], pixels_of(*tall)[0]
    sizes = torch.tensor([[2 * 14, 4 * 14], [8 * 14, 9 * 14]])

    def together() -> list[np.ndarray]:
        with torch.no_grad():
            return np.split(model(pixels, image_sizes=sizes).last_hidden_state[0].numpy(), [8])

    truth = together()
    monkeypatch.setattr(modeling_pixtral, "generate_block_attention_mask", lambda *_: None)
    assert_avoided(encode(subject.encoder, [wide, tall]), truth, together())


@pytest.mark.parametrize("order", ["columns first", "patches slower than channels"])
def test_mistral3_merges_squares_of_patches_row_by_row(subjects: Callable[[str], Subject], order: str) -> None:
    def mistake(model: nn.Module) -> None:
        layer, d = model.multi_modal_projector.patch_merger.merging_layer, SIZES.embed
        if order == "columns first":
            kernel = layer.weight.data.reshape(d, d, 2, 2).swapaxes(2, 3)
        else:
            kernel = layer.weight.data.reshape(d, 4, d).swapaxes(1, 2)
        layer.weight.data = kernel.reshape(d, 4 * d)

    subjects("mistral3").avoids(mistake)


def test_mistral3_merges_what_is_normalised_with_the_language_models_epsilon(
    subjects: Callable[[str], Subject], tmp_path: Path
) -> None:
    subject = subjects("mistral3")
    subject.avoids(lambda model: setattr(model.multi_modal_projector, "norm", nn.Identity()))
    # the last block's output is as small as what the epsilon is beside
    faint = dict.fromkeys(("patch_conv", "ln_pre", "o_proj", "down_proj"), 1e-3)
    checkpoint = subject.model.make(scales=faint)
    original = Original(subject.original.kind, checkpoint)
    rows = encode(jaxenc.load(checkpoint.write(tmp_path), dtype="float32"), subject.items)

    def towers(model: nn.Module) -> None:
        use_epsilon(model.multi_modal_projector, eps=1e-5)

    assert_avoided(rows, original.run(subject.items).rows, original.run(subject.items, alter=towers).rows)


@pytest.mark.parametrize("subject", ["pixtral", "mistral3"], indirect=True)
def test_pixtrals_projector_has_the_erf_gelu(subject: Subject) -> None:
    subject.avoids(lambda model: use_activation(model.multi_modal_projector, name="gelu_pytorch_tanh"))
