"""Devices, and who runs tasks on them within which limits."""
