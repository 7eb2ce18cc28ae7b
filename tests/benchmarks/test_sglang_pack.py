"""What the packed SGLang keeps: machine code for Hopper alone, pruned wheels, and an archive that is reproducible."""

import importlib
import struct
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

PTX, MACHINE = 1, 2
ENTRY_HEADER, CONTAINER_HEADER = 64, 16


@pytest.fixture(scope="module")
def pack() -> ModuleType:
    return importlib.import_module("sglang_pack")


def entry(kind: int, architecture: int, code: bytes) -> bytes:
    header = bytearray(ENTRY_HEADER)
    struct.pack_into("<HHIQ", header, 0, kind, 257, ENTRY_HEADER, len(code))
    struct.pack_into("<I", header, 28, architecture)
    return bytes(header) + code


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    image = struct.pack("<IHHQ", 0xBA55ED50, 1, CONTAINER_HEADER, len(body)) + body
    return image + bytes(-len(image) % 8)


def shared_object(section: bytes, name: bytes = b".nv_fatbin") -> bytearray:
    """A 64-bit ELF file of a section with this name, one of other bytes, and the sections' names."""
    names = b"\0" + name + b"\0.text\0.shstrtab\0"
    contents = [b"", section, b"machine code of the host", names]
    titles = [0, 1, names.index(b".text"), names.index(b".shstrtab")]
    image, headers = bytearray(64), b""
    for title, content in zip(titles, contents, strict=True):
        image += bytes(-len(image) % 8)
        headers += struct.pack("<IIQQQQ", title, 1, 0, 0, len(image), len(content)) + bytes(24)
        image += content
    image += bytes(-len(image) % 8)
    image[:4] = b"\x7fELF"
    struct.pack_into("<Q", image, 40, len(image))
    struct.pack_into("<HHH", image, 58, 64, len(contents), 3)
    return image + headers


def test_device_code_of_other_gpus_is_zeroed(pack: ModuleType) -> None:
    parts = {
        "ampere": entry(MACHINE, 80, b"A" * 24),
        "hopper": entry(MACHINE, 90, b"H" * 40),
        "blackwell": entry(MACHINE, 100, b"B" * 16),
        "ptx beside": entry(PTX, 90, b"p" * 8),
    }
    only_ptx = container(entry(PTX, 80, b"q" * 8), entry(PTX, 100, b"r" * 8))
    image = shared_object(container(*parts.values()) + only_ptx)
    before = bytes(image)
    tally = pack.keep_hopper(image)
    assert tally == {
        "zeroed sm_80": 24,
        "kept sm_90": 40,
        "zeroed sm_100": 16,
        "zeroed ptx_90": 8,
        "kept ptx_80": 8,
        "zeroed ptx_100": 8,
    }
    # Headers, by which the driver selects, and everything else are as they were.
    expected = before
    for letter, count in ((b"A", 24), (b"B", 16), (b"p", 8), (b"r", 8)):
        expected = expected.replace(letter * count, bytes(count))
    assert bytes(image) == expected


def test_files_without_device_code_stay(pack: ModuleType) -> None:
    image = shared_object(container(entry(MACHINE, 80, b"A" * 24)), name=b".rodata")
    before = bytes(image)
    assert not pack.keep_hopper(image)
    assert bytes(image) == before


def test_an_entry_that_is_none_is_refused(pack: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"expected an entry of a fatbin at byte .* got kind 7"):
        pack.keep_hopper(shared_object(container(entry(7, 90, b"H" * 8))))


def test_wheels_are_pruned(pack: ModuleType, tmp_path: Path) -> None:
    kept = {
        "sgl_kernel/sm90/common_ops.abi3.so": b"no ELF file",
        "sglang/srt/layers/attention/dsa_backend.py": b"",
        "sglang/srt/configs/qwen3_asr.py": b'AutoConfig.register("qwen3_asr", Config)\n',
        "sglang/test/__init__.py": b"",
        "sglang/test/kits/attention_unittest/attention_methods/dsa_attention.py": b"",
        "sglang/srt/moe/E=256,device_name=NVIDIA_H200.json": b"{}",
        "flashinfer/data/cutlass/tools/util/include/cutlass/util/helper.h": b"",
        "sglang-0.5.17.dist-info/METADATA": b"",
    }
    left_out = [
        "sgl_kernel/flash_ops.abi3.so",
        "sgl_kernel/sm100/common_ops.abi3.so",
        "sglang/multimodal_gen/main.py",
        "sglang/test/test_utils.py",
        "sglang/test/kits/other.py",
        "sglang/srt/moe/E=256,device_name=NVIDIA_B200.json",
        "flashinfer/data/cutlass/tools/profiler/main.cu",
        "flashinfer/data/csrc/gemm_sm120.cu",
        "sglang-0.5.17.data/scripts/run",
    ]
    with zipfile.ZipFile(tmp_path / "all.whl", "w") as wheel:
        for path in reversed(list(kept)):
            wheel.writestr(path, kept[path])
        for path in left_out:
            wheel.writestr(path, b"too much")
    entries = list(pack.collect([tmp_path / "all.whl"]))
    assert [entry.path for entry in entries] == sorted(kept)
    changed = {entry.path: entry.content for entry in entries}["sglang/srt/configs/qwen3_asr.py"]
    assert changed == b'AutoConfig.register("qwen3_asr", Config, exist_ok=True)\n'


def test_an_archive_depends_on_its_contents_alone(
    pack: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "COMPRESSION", [{"id": pack.lzma.FILTER_LZMA2, "preset": 0}])
    entries = [pack.Entry("a/b.py", b"one", False), pack.Entry("a/run", b"two", True)]
    digests = [pack.write(entries, tmp_path / name) for name in ("first.tar.xz", "second.tar.xz")]
    assert digests[0] == digests[1]
    assert (tmp_path / "first.tar.xz").read_bytes() == (tmp_path / "second.tar.xz").read_bytes()
    other = [entries[0], pack.Entry("a/run", b"three", True)]
    assert pack.write(other, tmp_path / "third.tar.xz") != digests[0]
    pack.unpack(tmp_path / "first.tar.xz", tmp_path / "unpacked")
    assert (tmp_path / "unpacked/a/b.py").read_bytes() == b"one"
    assert (tmp_path / "unpacked/a/run").stat().st_mode & 0o111


def test_wheels_must_have_the_pinned_hashes(pack: ModuleType, tmp_path: Path) -> None:
    pins = pack.wanted()
    assert "sglang==0.5.17" in pins.values()
    (tmp_path / "sglang-0.5.17-py3-none-any.whl").write_bytes(b"something else")
    with pytest.raises(SystemExit, match=r"lacks .*sglang==0.5.17.*; run without --wheels"):
        pack.wheels(tmp_path)
