"""What tests share: one package per room, imported as `specctl_testing.ROOM.MODULE`."""
