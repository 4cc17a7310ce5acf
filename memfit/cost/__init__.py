"""Cost: seconds and workspace bytes of each op, measured on this device or by a roofline for another one."""
