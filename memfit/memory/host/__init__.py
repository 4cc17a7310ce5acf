"""Where storages go that leave the device: layout, slabs, copies."""
