"""Packs SGLang 0.5.17 for a machine with one Hopper GPU and no network, and unpacks it there.

    python benchmarks/sglang_pack.py --out dist [--wheels DIR]         (needs a network and pip)
    python benchmarks/sglang_pack.py --unpack DIR --archive FILE       (needs neither)

SGLang 0.5.17 is the last version that pins torch 2.11.0. The machine must have CPython 3.12, torch 2.11.0 for CUDA 13
with torchvision 0.26.0, triton 3.6.0, transformers 5.17.0 and the usual packages around them (einops, pillow, psutil,
uvloop, ...), and for kernels that are compiled at their first use nvcc and ninja. The wheels of
`sglang_requirements.txt` are what such a machine lacks. They are checked by their hashes and pruned; device code for
other GPUs is overwritten with zeros. `--unpack` prints the line of shell that puts the folder on Python's path.
"""

import argparse
import hashlib
import io
import lzma
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().with_name("sglang_requirements.txt")
ARCHIVE = "sglang_sm90.tar.xz"
LIMIT = 54 << 20
# One window over the whole archive: CUTLASS is in it twice.
COMPRESSION = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 256 << 20}]

GLIBC = (5, 12, 17, 24, 26, 27, 28, 31, 34)
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC]
PLATFORMS += [f"manylinux{year}_x86_64" for year in (1, 2010, 2014)]

# What is left out, with a pattern for the whole path inside a wheel.
LEFT_OUT = (
    ("FlashAttention 3 (1.1 GB): dense prefill and the fa3 backend do not work", r"sgl_kernel/flash_ops\..*"),
    ("InfLLM kernels", r"sgl_kernel/infllm_ops\..*"),
    ("kernels for Blackwell", r"sgl_kernel/sm100/.*"),
    ("image and video generation", r"sglang/multimodal_gen/.*"),
    ("front ends in Rust", r"sglang/srt/(grpc|server|multimodal)/_core\..*\.so"),
    ("tests, except the attention kit", r"sglang/test/(?!__init__\.py|kits/(__init__\.py|attention_unittest/)).*"),
    ("tuning tables of other GPUs", r"sglang/.*device_name=(?!NVIDIA_H200[,.])[^/]*\.json"),
    (
        "sources of CUTLASS that no kernel includes",
        r"flashinfer/data/cutlass/(python|test|examples|media|docs|tools/(?!util/include)).*",
    ),
    (
        "sources of FlashInfer's kernels for mixtures of experts",
        r"flashinfer/data/csrc/(fused_moe|nv_internal|trtllm).*",
    ),
    ("CCCL (nvcc brings one)", r"flashinfer/data/cccl/.*"),
    ("kernels for Blackwell", r"flashinfer/data/csrc/.*(blackwell|sm100|sm103|sm110|sm120).*"),
    ("sources of compiled modules", r".*\.(pyx|pxd|pyi|a)|tvm_ffi/3rdparty/.*\.(c|cpp)"),
    ("third-party sources", r"tvm_ffi/3rdparty/libbacktrace/.*"),
    ("what belongs to a build of the wheel", r"(build_backend|build_utils)\.py|tools/.*"),
    ("memory saver for CUDA 12", r"torch_memory_saver_hook_mode_[a-z]+(_cu12)?\.abi3\.so"),
    ("scripts", r"[^/]+\.data/.*"),
)

# What is changed in the sources, and why.
CHANGED = {
    "sglang/srt/configs/qwen3_asr.py": (
        "transformers 5.17.0 knows these models already, 5.12.1 did not",
        rb"(AutoConfig\.register\([^)]*)\)",
        rb"\1, exist_ok=True)",
    ),
}


@dataclass(frozen=True)
class Entry:
    """A file of the archive."""

    path: str
    content: bytes
    executable: bool


def wanted() -> dict[str, str]:
    """The pinned wheels: name and version by hash."""
    pins = re.findall(r"^(\S+==\S+) --hash=sha256:([0-9a-f]{64})$", REQUIREMENTS.read_text(), re.MULTILINE)
    return {digest: pin for pin, digest in pins}


def download(folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--require-hashes",
        "--dest",
        str(folder),
    ]
    command += ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
    command += [part for abi in ("cp312", "abi3", "none") for part in ("--abi", abi)]
    command += [part for platform in PLATFORMS for part in ("--platform", platform)]
    subprocess.run([*command, "--requirement", str(REQUIREMENTS)], check=True)


def wheels(folder: Path) -> list[Path]:
    """The wheels of all pins; other files in the folder do not matter."""
    missing, found = wanted(), []
    for path in sorted(folder.glob("*.whl")):
        with path.open("rb") as file:
            if missing.pop(hashlib.file_digest(file, "sha256").hexdigest(), None) is not None:
                found.append(path)
    if missing:
        raise SystemExit(f"error: {folder} lacks {', '.join(sorted(missing.values()))}; run without --wheels")
    return found


def fatbins(image: bytearray) -> Iterator[tuple[int, int]]:
    """Begin and end of every fatbin container in a 64-bit ELF file.

    The containers of a section follow one another at multiples of 8 bytes. Each begins with the magic number, a 16-bit
    version, the 16-bit size of its header and the 64-bit size of what follows the header.
    """
    (table,) = struct.unpack_from("<Q", image, 40)
    size, count, names = struct.unpack_from("<HHH", image, 58)
    headers = [struct.unpack_from("<IIQQQQ", image, table + number * size) for number in range(count)]
    for name, _, _, _, begin, length in headers:
        title = image[headers[names][4] + name :][:16]
        if not title.startswith((b".nv_fatbin", b"__nv_relfatbin")):
            continue
        at = begin
        while at + 16 <= begin + length:
            magic, _, header, body = struct.unpack_from("<IHHQ", image, at)
            if magic != 0xBA55ED50:
                at += 8
                continue
            yield at + header, at + header + body
            at = (at + header + body + 7) // 8 * 8


def keep_hopper(image: bytearray) -> Counter[str]:
    """Overwrite device code that a Hopper GPU does not run with zeros; returns the bytes kept and zeroed, by kind.

    An entry of a container has a 16-bit kind (1 PTX, 2 machine code), the 32-bit size of its header at byte 4, the
    64-bit size of its code at byte 8 and the architecture at byte 28. The driver selects by headers, which stay.
    PTX stays only where no machine code for Hopper is beside it.
    """
    tally: Counter[str] = Counter()
    for begin, end in fatbins(image):
        entries = []
        at = begin
        while at + 32 <= end:
            kind, _, header, length = struct.unpack_from("<HHIQ", image, at)
            (architecture,) = struct.unpack_from("<I", image, at + 28)
            if kind not in (1, 2) or header < 32 or at + header + length > end:
                raise ValueError(f"expected an entry of a fatbin at byte {at}, got kind {kind}, header {header}")
            entries.append((kind == 2, architecture, at + header, length))
            at += header + length
        native = any(machine and architecture == 90 for machine, architecture, _, _ in entries)
        for machine, architecture, code, length in entries:
            keep = architecture == 90 if machine else architecture <= 90 and not native
            if not keep:
                image[code : code + length] = bytes(length)
            tally[f"{'kept' if keep else 'zeroed'} {'sm' if machine else 'ptx'}_{architecture}"] += length
    return tally


def collect(paths: list[Path]) -> Iterator[Entry]:
    """The files of the archive, in the order of their paths."""
    left_out: Counter[str] = Counter()
    members: dict[str, tuple[zipfile.ZipFile, zipfile.ZipInfo]] = {}
    for path in paths:
        wheel = zipfile.ZipFile(path)
        for info in wheel.infolist():
            why = next((why for why, pattern in LEFT_OUT if re.fullmatch(pattern, info.filename)), None)
            if why is not None:
                left_out[why] += info.file_size
            elif not info.is_dir():
                members[info.filename] = wheel, info
    for why, size in left_out.most_common():
        print(f"left out {size / 2**20:7.1f} MiB: {why}")
    for target, (wheel, info) in sorted(members.items()):
        content = wheel.read(info)
        if target.endswith(".so") and content.startswith(b"\x7fELF"):
            image = bytearray(content)
            tally = keep_hopper(image)
            if tally:
                content = bytes(image)
                sizes = ", ".join(f"{what} {size / 2**20:.1f}" for what, size in sorted(tally.items()))
                print(f"{target}, MiB: {sizes}")
        if target in CHANGED:
            why, pattern, replacement = CHANGED[target]
            content, times = re.subn(pattern, replacement, content)
            print(f"changed {times} lines of {target}: {why}")
        yield Entry(target, content, bool(info.external_attr >> 16 & 0o111))


def write(entries: Iterable[Entry], target: Path) -> str:
    """Write the archive, which depends on the wheels alone; returns a digest of its contents."""
    digest = hashlib.sha256()
    with (
        lzma.open(target, "wb", format=lzma.FORMAT_XZ, filters=COMPRESSION) as stream,
        tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as archive,
    ):
        for entry in entries:
            info = tarfile.TarInfo(entry.path)
            info.size, info.mode, info.mtime = len(entry.content), 0o755 if entry.executable else 0o644, 315532800
            archive.addfile(info, io.BytesIO(entry.content))
            digest.update(f"{entry.path} {hashlib.sha256(entry.content).hexdigest()}\n".encode())
    return digest.hexdigest()


def unpack(archive: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "r:xz") as file:
        file.extractall(folder, filter="data")
    print(f"export PYTHONPATH={folder.resolve()}${{PYTHONPATH:+:$PYTHONPATH}}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("dist"), help="folder for the archive")
    parser.add_argument("--wheels", type=Path, help="folder that holds or keeps the wheels")
    parser.add_argument("--unpack", type=Path, help="unpack into this folder instead")
    parser.add_argument("--archive", type=Path, default=Path("dist") / ARCHIVE, help="the archive to unpack")
    options = parser.parse_args()
    if options.unpack is not None:
        unpack(options.archive, options.unpack)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    target = options.out / ARCHIVE
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.wheels or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        download(folder)
        digest = write(collect(wheels(folder)), target)
    size = target.stat().st_size
    print(f"{target}: {size / 2**20:.1f} MiB, contents {digest}")
    if size > LIMIT:
        raise SystemExit(f"error: expected at most {LIMIT >> 20} MiB; leave out more")


if __name__ == "__main__":
    main()
