"""Pipeline schedules, without a device."""
