"""The walls around a process that holds a candidate: what it can read, write and reach.

In namespaces (`enter`) it sees the machine's files read-only, with the user's home, the Hub's folders and temporary
files replaced by empty ones of its own, no devices but those that compute, and no processes but its own. Where
namespaces are refused (`restrict`) Landlock gives most of the same: no writing outside of a folder of its own, nothing
of the user's files, no signals to others, no network. In both cases (`give_up_rights`) it has no capabilities, cannot
gain any, and a filter refuses the system calls that reach into other processes, the network or the kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from autokernel_hf.cache import cache_root

PRIVATE = "/tmp"  # noqa: S108 - in the namespace it is the process's own
TMPFS_BYTES = 2 << 30

_MS_RDONLY, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 4096, 16384, 1 << 18
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_MOUNT_ATTR_RDONLY = 1
_NR_MOUNT_SETATTR = 442  # the same on every architecture, as all system calls since 2019
_NR_LANDLOCK_CREATE, _NR_LANDLOCK_ADD, _NR_LANDLOCK_RESTRICT = 444, 445, 446

_PR_SET_NO_NEW_PRIVS, _PR_CAPBSET_DROP, _PR_SET_SECCOMP = 38, 24, 22
_SECCOMP_MODE_FILTER = 2

# Devices that a kernel, or the interpreter under it, needs.
_DEVICES = ("null", "zero", "full", "random", "urandom", "kfd", "dri", "nvidia-caps")
_DEVICE_PREFIX = "nvidia"

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Walls:
    """What a process may see.

    Args:
        hidden: Folders that are empty for it: the user's home, the Hub's caches, temporary files.
        needed: Folders within hidden ones that it needs to read all the same: the interpreter, its packages.
        writable: Folders that it may change.
    """

    hidden: tuple[str, ...]
    needed: tuple[str, ...]
    writable: tuple[str, ...] = ()


def walls(environment: Mapping[str, str], *, builder: bool) -> Walls:
    """The walls for this interpreter. A builder, which runs compilers but no candidate, may fill the build cache."""
    home = environment.get("HOME") or str(Path.home())
    named = [environment.get(n) for n in ("HF_HOME", "HF_HUB_CACHE", "TMPDIR", "XDG_CACHE_HOME")]
    hidden = {PRIVATE, "/var/tmp", "/dev/shm", home, *(n for n in named if n)}  # noqa: S108
    hidden = {str(Path(p).resolve()) for p in hidden}
    # Whoever has no home has the root folder, or a system one: there is nothing to hide there.
    hidden -= {"/", "/usr", "/etc", "/dev", "/proc", "/sys", "/nonexistent"}
    cache = cache_root().resolve()
    with contextlib.suppress(OSError):  # who needs it will say that it cannot be written
        cache.mkdir(parents=True, exist_ok=True)
    needed = {str(cache), *map(str, _own_files())}
    if builder:
        needed |= {p for p in environment.get("PATH", "").split(os.pathsep) if p}
    below = {p for p in needed if any(_is_below(p, h) for h in hidden) and Path(p).is_dir()}
    return Walls(
        hidden=tuple(sorted(h for h in hidden if Path(h).is_dir())),
        needed=tuple(sorted(p for p in below if not any(_is_below(p, other) for other in below))),
        writable=(str(cache),) if builder and cache.is_dir() else (),
    )


def _own_files() -> Iterable[Path]:
    """Where this interpreter, its packages and its libraries lie."""
    yield from (Path(p).resolve() for p in (sys.prefix, sys.base_prefix, sys.exec_prefix))
    yield from (Path(sys.executable).parent, Path(os.path.realpath(sys.executable)).parent)
    yield from (Path(p).resolve() for p in sys.path if p and Path(p).exists())
    yield Path(__file__).resolve().parent.parent.parent
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            yield Path(os.environ[name]).resolve()
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith("/") and Path(fields[5]).is_file():
            yield Path(fields[5]).parent


def _is_below(path: str, folder: str) -> bool:
    return path != folder and Path(path).is_relative_to(folder)


# --- namespaces -------------------------------------------------------------------------------------------------------


def enter(wanted: Walls) -> list[str]:
    """Put up the walls, as the first process of mount and pid namespaces that are not shared.

    Returns:
        What this system did not allow, in words.

    Raises:
        OSError: The files could not be made private and read-only: there are no walls.
    """
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    kept = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in (*wanted.needed, *wanted.writable)}
    devices = {p.name: os.open(p, os.O_PATH | os.O_CLOEXEC) for p in _devices()}
    _set_read_only("/", read_only=True, recursive=True)
    for folder in wanted.hidden:
        if folder != "/dev/shm" and Path(folder).is_dir():
            _mount("tmpfs", folder, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={TMPFS_BYTES},mode=0777")
    for path, descriptor in kept.items():
        _show_again(path, descriptor, wanted)
    for path in wanted.writable:
        _set_read_only(path, read_only=False, recursive=False)
    missing = []
    try:
        _own_devices(devices)
    except OSError:
        missing.append("other devices are not hidden")
    try:
        _own_processes()
    except OSError:
        missing.append("other processes are not hidden")
    for descriptor in (*kept.values(), *devices.values()):
        os.close(descriptor)
    os.chdir(PRIVATE)
    return missing


def _devices() -> list[Path]:
    names = [Path("/dev", n) for n in _DEVICES]
    return [p for p in (*names, *Path("/dev").glob(f"{_DEVICE_PREFIX}[0-9]*"), *_control()) if p.exists()]


def _control() -> list[Path]:
    names = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset", "nvidia-nvswitchctl")
    return [Path("/dev", n) for n in names]


def _show_again(path: str, descriptor: int, wanted: Walls) -> None:
    """Bind a folder to its own place, where a hidden one covers it or it is to be writable."""
    target = Path(path)
    if any(_is_below(path, h) for h in wanted.hidden):
        target.mkdir(parents=True, exist_ok=True)
    _mount(f"/proc/self/fd/{descriptor}", path, None, _MS_BIND | _MS_REC)


def _own_processes() -> None:
    """A /proc with the processes of this namespace, in which nothing of the kernel can be changed.

    It cannot be read-only as a whole: CUDA names its threads there, and does not start where it cannot.
    """
    _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() or entry.is_symlink():
            continue
        if entry.is_dir() or entry.stat().st_mode & 0o222:
            _mount(str(entry), str(entry), None, _MS_BIND)
            _set_read_only(str(entry), read_only=True, recursive=False)


def _own_devices(nodes: Mapping[str, int]) -> None:
    """A /dev that holds nothing but these."""
    _mount("tmpfs", "/dev", "tmpfs", _MS_NOSUID, "size=1m,mode=0755")
    for name, descriptor in nodes.items():
        target = Path("/dev", name)
        if Path(f"/proc/self/fd/{descriptor}").is_dir():
            target.mkdir()
        else:
            target.touch()
        _mount(f"/proc/self/fd/{descriptor}", str(target), None, _MS_BIND | _MS_REC)
    Path("/dev/fd").symlink_to("/proc/self/fd")
    Path("/dev/shm").mkdir()
    _mount("tmpfs", "/dev/shm", "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={TMPFS_BYTES},mode=1777")


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    done = _libc.mount(
        source.encode(),
        target.encode(),
        kind.encode() if kind else None,
        ctypes.c_ulong(flags),
        data.encode() if data else None,
    )
    _raise_if(done != 0, f"mount {target}")


def _set_read_only(path: str, *, read_only: bool, recursive: bool) -> None:
    # struct mount_attr: attributes to set, to clear, propagation, a user namespace.
    values = (_MOUNT_ATTR_RDONLY, 0, 0, 0) if read_only else (0, _MOUNT_ATTR_RDONLY, 0, 0)
    attributes = struct.pack("=4Q", *values)
    done = _libc.syscall(
        ctypes.c_long(_NR_MOUNT_SETATTR),
        ctypes.c_int(_AT_FDCWD),
        ctypes.c_char_p(path.encode()),
        ctypes.c_uint(_AT_RECURSIVE if recursive else 0),
        ctypes.c_char_p(attributes),
        ctypes.c_size_t(len(attributes)),
    )
    _raise_if(done != 0, f"mount_setattr {path}")


def _raise_if(failed: bool, what: str) -> None:
    if failed:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def cuda_starts() -> bool:
    """Whether CUDA's driver comes up in this process, which must not fork afterwards; True where there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True
    no_device = 100
    return driver.cuInit(0) in (0, no_device)


# --- without namespaces -----------------------------------------------------------------------------------------------

# Access rights of files, by the version of Landlock that knows them.
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_FILES_V1 = (1 << 13) - 1
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_NET_TCP = 3
_SCOPE_ABSTRACT_AND_SIGNALS = 3
_RULE_PATH_BENEATH = 1


def restrict(wanted: Walls, private: str) -> list[str]:
    """Put this process, and all that it will start, under Landlock.

    Args:
        private: The folder that it may do anything in.

    Returns:
        What this system cannot enforce, in words.
    """
    version = _libc.syscall(ctypes.c_long(_NR_LANDLOCK_CREATE), None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    missing = ["processes of other sessions are not hidden"]
    if version < 1:
        return [*missing, "files are neither hidden nor read-only (no Landlock)"]
    handled = _FILES_V1 | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    handled |= _IOCTL_DEV if version >= 5 else 0
    net = _NET_TCP if version >= 4 else 0
    scoped = _SCOPE_ABSTRACT_AND_SIGNALS if version >= 6 else 0
    if not scoped:
        missing.append("signals to other processes are possible (old Landlock)")
    size = 8 if version < 4 else 16 if version < 6 else 24
    attributes = struct.pack("=3Q", handled, net, scoped)[:size]
    ruleset = _libc.syscall(
        ctypes.c_long(_NR_LANDLOCK_CREATE),
        ctypes.c_char_p(attributes),
        ctypes.c_size_t(size),
        ctypes.c_uint32(0),
    )
    _raise_if(ruleset < 0, "landlock_create_ruleset")
    read = _EXECUTE | _READ_FILE | _READ_DIR
    for path in _readable(wanted):
        _allow(ruleset, path, read & handled)
    for device in _devices():
        _allow(ruleset, str(device), handled & (_READ_FILE | _READ_DIR | _WRITE_FILE | _IOCTL_DEV))
    for path in (private, *wanted.writable):
        _allow(ruleset, path, handled)
    # CUDA names its threads there, and does not start where it cannot. Root could change the kernel's settings there too,
    # unless they are read-only (as in a container): it gets the threads of this process alone.
    kernel_is_safe = not os.access("/proc/sys/kernel/core_pattern", os.W_OK)
    threads = "/proc" if kernel_is_safe else "/proc/self/task"
    _allow(ruleset, threads, handled & (read | _WRITE_FILE | _TRUNCATE))
    _raise_if(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0, "no_new_privs")
    done = _libc.syscall(ctypes.c_long(_NR_LANDLOCK_RESTRICT), ctypes.c_int(ruleset), ctypes.c_uint32(0))
    _raise_if(done != 0, "landlock_restrict_self")
    os.close(ruleset)
    return missing


def _readable(wanted: Walls) -> list[str]:
    """The folders of the root that hold nothing hidden, and what is needed of the others."""
    found = list(wanted.needed)

    def walk(folder: Path, depth: int) -> None:
        for entry in folder.iterdir():
            path = str(entry)
            if path in wanted.hidden:
                continue
            if not any(_is_below(h, path) for h in wanted.hidden):
                found.append(path)
            elif depth:
                with contextlib.suppress(OSError):
                    walk(entry, depth - 1)

    walk(Path("/"), 3)
    return found


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # it is not there, so there is nothing to allow
    try:
        if not os.path.isdir(path):  # noqa: PTH112 - a symbolic link to a file counts as what it leads to
            rights &= _EXECUTE | _READ_FILE | _WRITE_FILE | _TRUNCATE | _IOCTL_DEV
        beneath = struct.pack("=Qi", rights, descriptor)
        done = _libc.syscall(
            ctypes.c_long(_NR_LANDLOCK_ADD),
            ctypes.c_int(ruleset),
            ctypes.c_int(_RULE_PATH_BENEATH),
            ctypes.c_char_p(beneath),
            ctypes.c_uint32(0),
        )
        # A pipe or a socket, as /dev/stderr may be: it has no path, so Landlock does not rule it.
        _raise_if(done != 0 and ctypes.get_errno() != errno.EBADFD, f"landlock_add_rule {path}")
    finally:
        os.close(descriptor)


# --- rights -----------------------------------------------------------------------------------------------------------

# System calls that no kernel needs, by their numbers: x86-64, then the generic table (arm64).
_REFUSED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "open_by_handle_at": (304, 265),
    "pidfd_getfd": (438, 438),
    "kexec_load": (246, 104),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "acct": (163, 89),
}
_SOCKET = (41, 198)
_LOCAL_FAMILIES = (1, 16)  # AF_UNIX, AF_NETLINK
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_X32 = 0x40000000
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _REFUSE, _END = 0x7FFF0000, 0x00050001, 0x80000000  # refused calls fail with EPERM


def give_up_rights() -> list[str]:
    """Drop every capability for good, and filter system calls; for the process that will hold a candidate.

    Returns:
        What this system cannot enforce, in words.
    """
    for capability in range(64):
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # refused to a plain user, who has none
    header = struct.pack("=Ii", 0x20080522, 0)
    nothing = bytes(24)
    _libc.capset(ctypes.c_char_p(header), ctypes.c_char_p(nothing))
    _raise_if(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0, "no_new_privs")
    known = _ARCHITECTURES.get(platform.machine())
    if known is None:
        return [f"system calls are not filtered ({platform.machine()})"]
    program = _program(*known)
    buffer = ctypes.create_string_buffer(b"".join(program))
    # struct sock_fprog: a count, padding, a pointer.
    described = struct.pack("@HxxxxxxQ" if ctypes.sizeof(ctypes.c_void_p) == 8 else "@HxxI",
                            len(program), ctypes.addressof(buffer))  # fmt: skip
    done = _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.c_char_p(described), 0, 0)
    return [] if done == 0 else ["system calls are not filtered (no seccomp)"]


def _program(column: int, architecture: int) -> list[bytes]:
    """The filter, as classic BPF: loads of `struct seccomp_data`, comparisons, returns."""
    numbers = [pair[column] for pair in _REFUSED.values()]
    program = [
        _step(_LOAD, 0, 0, 4),  # the architecture
        _step(_EQUAL, 1, 0, architecture),
        _step(_RETURN, 0, 0, _END),
        _step(_LOAD, 0, 0, 0),  # the call's number
    ]
    if column == 0:
        program += [_step(_AT_LEAST, 0, 1, _X32), _step(_RETURN, 0, 0, _REFUSE)]
    for number in numbers:
        program += [_step(_EQUAL, 0, 1, number), _step(_RETURN, 0, 0, _REFUSE)]
    program += [
        _step(_EQUAL, 1, 0, _SOCKET[column]),
        _step(_RETURN, 0, 0, _ALLOW),
        _step(_LOAD, 0, 0, 16),  # the family of the socket
    ]
    for family in _LOCAL_FAMILIES:
        program += [_step(_EQUAL, 0, 1, family), _step(_RETURN, 0, 0, _ALLOW)]
    program.append(_step(_RETURN, 0, 0, _REFUSE))
    return program


def _step(code: int, if_true: int, if_false: int, value: int) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
