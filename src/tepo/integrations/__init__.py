"""TEPO and every other objective inside other trainers; each module needs the extra of its name."""
