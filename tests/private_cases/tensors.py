"""Trees of tensors, tensors and storages."""

import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from tests.private_cases.parts import at, case


@case("torch.utils._pytree", to="walk lists, tuples and dicts of tensors")
def _() -> None:
    tree, pytree = {"a": [1, (2.0,)]}, at("torch.utils._pytree")
    assert pytree.tree_leaves(tree) == [1, 2.0]
    assert pytree.tree_map(lambda leaf: leaf + 1, tree) == {"a": [2, (3.0,)]}
    assert pytree.tree_map_only(int, str, tree) == {"a": ["1", (2.0,)]}


@case("._cdata", to="know which tensors share their memory")
def _() -> None:
    x = torch.ones(2)
    assert x.untyped_storage()._cdata == x[:1].untyped_storage()._cdata
    assert x.untyped_storage()._cdata != x.clone().untyped_storage()._cdata


@case("._base", to="know whose gradient the views of a batch have")
def _() -> None:
    x = torch.ones(2, requires_grad=True)
    assert x[:1]._base is x
    assert x._base is None


@case("torch._C._storage_Use_Count", to="know whether a view looks into a tensor's memory")
def _() -> None:
    def count() -> int:
        return at("torch._C._storage_Use_Count")(x.untyped_storage()._cdata)

    x = torch.ones(2)
    before = count()
    view = x[:1]
    assert count() == before + 1
    del view
    assert count() == before


@case("._use_count", to="know which gradients autograd would add in place")
def _() -> None:
    x = torch.ones(2, requires_grad=True).sin()
    before = x._use_count()
    y = x.cos()  # which saves it
    assert x._use_count() > before
    del y


@case("._version", to="see writes in place")
def _() -> None:
    x = torch.ones(2)
    before = x._version
    x.add_(1)
    assert x._version == before + 1


@case("._is_view", to="leave views out of what is cached or written over")
def _() -> None:
    x = torch.ones(2)
    assert (x._is_view(), x[:1]._is_view()) == (False, True)


@case("._indices", "._values", to="count both parts of a sparse tensor")
def _() -> None:
    x = torch.eye(2).to_sparse()
    assert (x._indices().shape, x._values().shape) == ((2, 2), (2,))


@case("._backward_hooks", "._post_accumulate_grad_hooks", to="find what is hooked on parameters")
def _() -> None:
    x = nn.Parameter(torch.ones(2))
    assert not x._backward_hooks
    assert not x._post_accumulate_grad_hooks
    x.register_hook(print)
    x.register_post_accumulate_grad_hook(print)
    assert list(x._backward_hooks.values()) == [print]
    assert list(x._post_accumulate_grad_hooks.values()) == [print]


@case("torch.Tensor._make_subclass", to="make parameters of a class of their own")
def _() -> None:
    class Own(nn.Parameter):
        pass

    assert type(torch.Tensor._make_subclass(Own, torch.ones(2), True)) is Own


@case("torch.Tensor._make_wrapper_subclass", to="make logits that have a shape and no memory")
def _() -> None:
    class Own(torch.Tensor):
        __torch_dispatch__ = None

    made = torch.Tensor._make_wrapper_subclass(Own, (2, 3), dtype=torch.bfloat16)
    assert (made.shape, made.dtype) == ((2, 3), torch.bfloat16)


@case("torch.nested._internal.nested_tensor.NestedTensor", to="leave jagged tensors alone")
def _() -> None:
    kind = at("torch.nested._internal.nested_tensor.NestedTensor")
    made = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    assert isinstance(made, kind)


@case("torch.utils._python_dispatch.transform_subclass", to="change what a tensor wraps")
def _() -> None:
    transform = at("torch.utils._python_dispatch.transform_subclass")
    made = TwoTensor(torch.ones(2), torch.zeros(2))
    changed = transform(made, lambda _, part: part + 1)
    assert isinstance(changed, TwoTensor)
    assert (changed.a.tolist(), changed.b.tolist()) == ([2.0, 2.0], [1.0, 1.0])
