"""Forbids this process the system call ``process_vm_writev``, then prints what the doctor finds, as JSON."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import platform
import struct

from cluster.config.settings import KvTransferConfig
from leadout.doctor.transfer_checks import check_memory_access, check_transfer

_NUMBER = {"x86_64": 311, "aarch64": 271}[platform.machine()]
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_FILTER_MODE = 2
_EPERM = 1


class _Program(ctypes.Structure):  # struct sock_fprog
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def forbid() -> None:
    """Holds for all children, too."""
    instructions = [
        (0x20, 0, 0, 0),  # load the system call's number
        (0x15, 0, 1, _NUMBER),  # another one: skip a line
        (0x06, 0, 0, 0x0005_0000 | _EPERM),  # fail with EPERM
        (0x06, 0, 0, 0x7FFF_0000),  # allow
    ]
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in instructions)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(instructions), ctypes.addressof(buffer))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert prctl(_PR_SET_SECCOMP, _FILTER_MODE, ctypes.byref(program), 0, 0) == 0, ctypes.get_errno()


if __name__ == "__main__":
    forbid()
    findings = [check_memory_access(), *check_transfer(KvTransferConfig())]
    print(json.dumps([dataclasses.asdict(finding) for finding in findings]))
