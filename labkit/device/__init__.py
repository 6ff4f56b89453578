"""Devices: profiles, this machine measured, the prefill pipeline and the planner."""

from labkit.device.profile import (
    DeviceProfile,
    Figure,
    FlashPoint,
    load_profile,
    profile_names,
    read_profile,
)

__all__ = [
    "DeviceProfile",
    "Figure",
    "FlashPoint",
    "load_profile",
    "profile_names",
    "read_profile",
]
