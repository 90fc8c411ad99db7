"""Attention sites of every kind: found, replaced for one module alone, given back, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import dsx
from core import sites_elsewhere
from dsx.contracts import Attend, Attention, Site, plain_attention
from dsx.errors import DsxError, SlotConflict
from dsx.plugin import Descriptor, Fill, Part, hook
from dsx.sites import find_sites


class Projected(nn.Module):
    """What the models below have in common."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()

    def joined(self, heads: Tensor) -> Tensor:
        out: Tensor = self.out(heads.transpose(1, 2).flatten(2))
        return out


class ByModule(Projected):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        return self.joined(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class ByPath(Projected):
    def forward(self, x: Tensor) -> Tensor:
        return self.joined(
            torch.nn.functional.scaled_dot_product_attention(*self.split(x), dropout_p=0.0, is_causal=True)
        )


class ByName(Projected):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        heads = [scaled_dot_product_attention(q, k, v, is_causal=True) for _ in range(1)]
        return self.joined(heads[0])


class ByMethod(Projected):
    def forward(self, x: Tensor) -> Tensor:
        return self.joined(self.attention_of(*self.split(x)))

    def attention_of(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class ByFunctions(Projected):
    def forward(self, x: Tensor) -> Tensor:
        return self.joined(sites_elsewhere.by_way_of_another(*self.split(x)))


class ByAttribute(Projected):
    def __init__(self) -> None:
        super().__init__()
        self.function = F.scaled_dot_product_attention

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        return self.joined(self.function(q, k, v, is_causal=True))


def closed() -> type[nn.Module]:
    function = F.scaled_dot_product_attention

    class ByClosure(Projected):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.split(x)
            return self.joined(function(q, k, v, is_causal=True))

    return ByClosure


class ForAuthors(Projected):
    def forward(self, x: Tensor) -> Tensor:
        return self.joined(dsx.attention(self, *self.split(x), causal=True))


class ByOwn(Projected):
    def __init__(self) -> None:
        super().__init__()
        self.attend: Attend = plain_attention

    def forward(self, x: Tensor) -> Tensor:
        return self.joined(self.attend(*self.split(x), causal=True))


class ByMultihead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        out: Tensor = self.inner(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]
        return out


KINDS: list[Any] = [
    ByModule,
    ByPath,
    ByName,
    ByMethod,
    ByFunctions,
    ByAttribute,
    closed(),
    ForAuthors,
    ByOwn,
    ByMultihead,
]


class Twins(nn.Module):
    """Two of a kind and a loss; only the second is claimed in the tests."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([kind(), kind()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


class Recorded(Attention):
    """Claims names that contain a word, and attends as torch does; values times `factor`."""

    def __init__(self, word: str, factor: float = 1.0) -> None:
        self.word, self.factor, self.calls = word, factor, 0

    def claim(self, site: Site) -> bool:
        return self.word in site.name

    def bind(self, site: Site) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **choices: Any) -> Tensor:
            self.calls += 1
            return plain_attention(q, k, v * self.factor, mask, **choices)

        return attend


class Plugin:
    def __init__(self, part: Attention, name: str = "mine") -> None:
        self.part = part
        self.descriptor = Descriptor(name, "attention", 1, {"attention": Fill()}, None, "of a test")

    @hook
    def dsx_attention(self) -> list[Part]:
        return [Part("attention", lambda ctx: self.part)]


def prepared(model: nn.Module, part: Attention, **manifest: Any) -> dsx.Engine:
    return dsx.prepare(model, {"attention": {"use": ["mine"]}, **manifest}, plugins={"mine": Plugin(part)})


X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", KINDS)
def test_one_module_is_replaced_and_given_back(kind: type[nn.Module]) -> None:
    model = Twins(kind)
    expected = model(X)
    expected.backward()
    gradient = model.layers[0].get_parameter(next(iter(dict(model.layers[0].named_parameters())))).grad.clone()
    model.zero_grad()
    names = set(model.layers[1].__dict__)
    part = Recorded("layers.1")
    engine = prepared(model, part)
    loss = engine(X)
    assert part.calls == 1
    torch.testing.assert_close(loss, expected)
    live = next(model.layers[0].parameters())
    (found,) = torch.autograd.grad(loss, live, retain_graph=True)
    torch.testing.assert_close(found, gradient)
    part.factor = 2.0
    assert not torch.allclose(engine(X), expected)
    engine.close()
    assert part.calls == 2 and set(model.layers[1].__dict__) == names
    torch.testing.assert_close(model(X), expected)
    assert part.calls == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_is_prepared_again_has_the_sites_of_the_new_run(kind: type[nn.Module]) -> None:
    model = Twins(kind)
    first, second = Recorded("layers"), Recorded("layers.0")
    prepared(model, first)(X)
    engine = prepared(model, second)
    engine(X)
    assert (first.calls, second.calls) == (2, 1)


def test_the_function_of_torch_and_of_others_stays_what_it_is() -> None:
    before = F.scaled_dot_product_attention, dict(F.__dict__), dict(sites_elsewhere.__dict__)
    model, other = Twins(ByFunctions), Twins(ByFunctions)
    part = Recorded("layers", factor=3.0)
    expected = other(X)
    prepared(model, part)(X)
    assert (F.scaled_dot_product_attention, dict(F.__dict__), dict(sites_elsewhere.__dict__)) == before
    assert torch.equal(other(X), expected) and part.calls == 2


def test_sites_are_named_with_their_kind() -> None:
    model = nn.Sequential(*(kind() for kind in KINDS))
    kinds = {site.name: site.kind for site in find_sites(model)}
    torchs = "calls torch's scaled_dot_product_attention"
    assert kinds == {
        **{str(number): torchs for number in range(7)},
        "7": "calls `dsx.attention`",
        "8": "calls its attribute `attend`",
        "9.inner": "is an nn.MultiheadAttention",
    }


def test_two_claims_of_one_site_are_a_conflict() -> None:
    plugins = {"mine": Plugin(Recorded("layers")), "other": Plugin(Recorded("1"), "other")}
    with pytest.raises(SlotConflict, match=r"'mine' and 'other' both claim the attention of 'layers\.1'"):
        dsx.prepare(Twins(ByModule), {"attention": {"use": ["mine", "other"]}}, plugins=plugins)


def test_a_claim_of_nothing_says_what_there_is() -> None:
    with pytest.raises(DsxError) as caught:
        prepared(Twins(ByModule), Recorded("blocks"))
    assert "'mine' claims none of the model's attention sites" in str(caught.value)
    assert "layers.0 (calls torch's scaled_dot_product_attention)" in str(caught.value)


class Later(Projected):
    def forward(self, x: Tensor) -> Tensor:
        from torch.nn.functional import scaled_dot_product_attention as function

        q, k, v = self.split(x)
        return self.joined(function(q, k, v))


class Above(ByModule):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Static(Projected):
    def forward(self, x: Tensor) -> Tensor:
        return self.joined(self.function(*self.split(x)))

    @staticmethod
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class Biased(ByMultihead):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, add_bias_kv=True)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Later, "in a way that is known only when it runs"),
        (Above, r"reaches it through super\(\)\.forward"),
        (Static, "function is no plain method"),
        (Biased, "add_bias_kv or add_zero_attn"),
    ],
)
def test_what_cannot_be_replaced_is_refused_by_name_and_left_whole(kind: type[nn.Module], words: str) -> None:
    model = Twins(kind)
    before = [dict(module.__dict__) for module in model.modules()]
    with pytest.raises(DsxError, match=words) as caught:
        prepared(model, Recorded("layers"))
    assert "the attention of 'layers.0" in str(caught.value)
    assert [set(module.__dict__) for module in model.modules()] == [set(names) for names in before]


def test_a_forward_that_somebody_put_on_an_instance_is_not_overwritten() -> None:
    model = Twins(ByModule)
    model.layers[1].forward = lambda x: x
    with pytest.raises(DsxError, match="has a forward that is not its class's"):
        prepared(model, Recorded("layers.1"))


def test_torchs_causal_counts_from_the_first_key() -> None:
    class Cross(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, k, is_causal=True)

    module = Cross()
    (site,) = find_sites(module)
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4)
    expected, three = module(q, k), module(q[:, 0], k[:, 0])
    undo = site.place(plain_attention)
    torch.testing.assert_close(module(q, k), expected)
    torch.testing.assert_close(module(q[:, 0], k[:, 0]), three)
    with pytest.raises(DsxError, match="causal attention of 5 queries and 3 keys"):
        module(k, q)
    with pytest.raises(DsxError, match="2 and 4 dimensions"):
        module(q[0, 0], k)
    undo()


def doubled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **choices: Any) -> Tensor:
    return plain_attention(q, k, v * 2, mask, **choices)


@pytest.mark.parametrize("kind", [ByModule, ByPath, ByMethod, ByFunctions, ForAuthors, ByMultihead])
def test_compiled_units_stay_whole_and_share_their_code(kind: type[nn.Module]) -> None:
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    model, plain = Twins(kind), Twins(kind)
    for site in (*find_sites(model), *find_sites(plain)):
        site.place(doubled)
    for layer in model.layers:
        layer.forward = torch.compile(layer.forward, backend=counter, fullgraph=True)
    with torch.no_grad():
        assert not torch.allclose(plain(X), Twins(kind)(X))
        torch.testing.assert_close(model(X), plain(X))
    assert counter.frame_count == 1, "layers of one kind share what is compiled"
