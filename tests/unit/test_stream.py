"""Files written tensor by tensor can be read by safetensors and torch."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, load_file

from fullshard.checkpoint.tensor_files import SafetensorsStream, TensorEntry
from fullshard.errors import CheckpointError
from fullshard.export.write import TorchStream

EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)


def tensors() -> dict[str, torch.Tensor]:
    numbers = torch.arange(15.0).reshape(3, 5) - 7
    return {
        "fp32": numbers,
        "bf16.odd": numbers.bfloat16()[:, :3].contiguous(),
        "bool": torch.tensor([True, False, True]),
        "fp64 after an odd number of bytes": numbers.double(),
        "fp16": numbers.half(),
        **{str(dtype): numbers.to(dtype) for dtype in EIGHT_BITS},
        **{str(d): numbers.abs().to(d) for d in (torch.int8, torch.int16, torch.int32, torch.int64)},
        **{str(d): numbers.abs().to(d) for d in (torch.uint8, torch.uint16, torch.uint32, torch.uint64)},
        "complex": torch.complex(numbers, numbers + 1),
        "transposed": numbers.T,
        "0-d": torch.tensor(1.5, dtype=torch.bfloat16),
        "0-d whole": torch.tensor(7),
        "empty": torch.empty(0, 4),
        "empty last": torch.empty(3, 0, dtype=torch.bfloat16),
        "model/näme ünicode": torch.ones(1),
    }


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (found[name], tensor)]
        assert torch.equal(*bits), name


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("reserve_bytes", [1 << 16, 8])
def test_safetensors_reads_every_dtype_and_shape(tmp_path: Path, announced: bool, reserve_bytes: int) -> None:
    path, expected = tmp_path / "a.safetensors", tensors()
    entries = {name: TensorEntry.of(tensor) for name, tensor in expected.items()} if announced else None
    with SafetensorsStream(path, entries=entries, reserve_bytes=reserve_bytes) as stream:
        for name, tensor in expected.items():
            stream.add(name, tensor)
    assert_same(load_file(path), expected)
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert_same({name: file.get_slice(name)[...] for name in file.keys()}, expected)  # noqa: SIM118
        assert torch.equal(file.get_slice("fp32")[1:3], expected["fp32"][1:3])


def test_an_announced_file_needs_no_seek() -> None:
    class Pipe(io.RawIOBase):
        def __init__(self) -> None:
            self.got = bytearray()

        def writable(self) -> bool:
            return True

        def write(self, data: object) -> int:
            self.got += bytes(data)  # type: ignore[call-overload]
            return len(bytes(data))  # type: ignore[call-overload]

    pipe, expected = Pipe(), tensors()
    stream = SafetensorsStream(pipe, entries={name: TensorEntry.of(t) for name, t in expected.items()})  # type: ignore[arg-type]
    for name, tensor in expected.items():
        stream.add(name, tensor)
    stream.close()
    assert not pipe.closed
    assert_same(load(bytes(pipe.got)), expected)


def test_rows_make_a_tensor_and_a_large_one_is_moved_for_its_header(tmp_path: Path) -> None:
    whole = torch.arange(5_000_000, dtype=torch.float32).reshape(1000, 5000)

    def rows() -> Iterator[torch.Tensor]:
        yield from whole.split(300)

    with SafetensorsStream(tmp_path / "a.safetensors", reserve_bytes=8) as stream:
        stream.add_rows("whole", TensorEntry.of(whole), rows())
        stream.add("tail", torch.tensor([1, 2, 3]))
    assert_same(load_file(tmp_path / "a.safetensors"), {"whole": whole, "tail": torch.tensor([1, 2, 3])})


def test_an_empty_file_can_be_read(tmp_path: Path) -> None:
    with SafetensorsStream(tmp_path / "a.safetensors"):
        pass
    assert load_file(tmp_path / "a.safetensors") == {}


def test_what_does_not_fit_the_announcement_is_refused(tmp_path: Path) -> None:
    entries = {"a": TensorEntry(torch.float32, (2,)), "b": TensorEntry(torch.float32, (2,))}
    with pytest.raises(ValueError, match="announced as"), SafetensorsStream(tmp_path / "1", entries=entries) as stream:
        stream.add("a", torch.zeros(3))
    with pytest.raises(ValueError, match="where a was"), SafetensorsStream(tmp_path / "2", entries=entries) as stream:
        stream.add("b", torch.zeros(2))
    with (
        pytest.raises(ValueError, match=r"not added: \['b'\]"),
        SafetensorsStream(tmp_path / "3", entries=entries) as stream,
    ):
        stream.add("a", torch.zeros(2))
    with SafetensorsStream(tmp_path / "4") as stream:
        stream.add("a", torch.zeros(2))
        with pytest.raises(ValueError, match="twice"):
            stream.add("a", torch.zeros(2))
    with pytest.raises(ValueError, match="needs 8"), SafetensorsStream(tmp_path / "5") as stream:
        stream.add_rows("a", TensorEntry(torch.float32, (2,)), [torch.zeros(1)])
    with pytest.raises(ValueError, match=r"is torch\.float32"), SafetensorsStream(tmp_path / "6") as stream:
        stream.add_rows("a", TensorEntry(torch.float32, (2,)), [torch.zeros(4, dtype=torch.bfloat16)])


def test_a_dtype_that_safetensors_lacks_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="complex128"), SafetensorsStream(tmp_path / "a") as stream:
        stream.add("a", torch.zeros(1, dtype=torch.complex128))


@pytest.mark.parametrize("announced", [True, False])
def test_an_interrupted_file_cannot_be_read(tmp_path: Path, announced: bool) -> None:
    entries = {"a": TensorEntry(torch.float32, (2,)), "b": TensorEntry(torch.float32, (2,))} if announced else None

    def stopped() -> Iterator[torch.Tensor]:
        yield torch.zeros(1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), SafetensorsStream(tmp_path / "a", entries=entries) as stream:
        stream.add_rows("a", TensorEntry(torch.float32, (2,)), stopped())
    with pytest.raises(SafetensorError):
        load_file(tmp_path / "a")


def test_torch_reads_a_streamed_state(tmp_path: Path) -> None:
    path, expected = tmp_path / "a.pt", tensors()
    with TorchStream(path, entries={name: TensorEntry.of(tensor) for name, tensor in expected.items()}) as stream:
        for name in reversed(expected):
            stream.add(name, expected[name])
    for options in ({"weights_only": True}, {"weights_only": True, "mmap": True}, {"weights_only": False}):
        found = torch.load(path, **options)  # type: ignore[arg-type]
        assert type(found) is dict
        assert_same(found, expected)


def test_torch_state_is_the_size_of_its_tensors(tmp_path: Path) -> None:
    entries = {f"layer.{index}": TensorEntry(torch.bfloat16, (256, 256)) for index in range(20)}
    with TorchStream(tmp_path / "a.pt", entries=entries) as stream:
        for index in range(20):
            stream.add(f"layer.{index}", torch.full((256, 256), index, dtype=torch.bfloat16))
    assert (tmp_path / "a.pt").stat().st_size < 1.02 * 20 * 256 * 256 * 2
    assert torch.load(tmp_path / "a.pt", weights_only=True)["layer.7"].unique().tolist() == [7]
