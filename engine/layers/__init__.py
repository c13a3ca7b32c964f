"""Layers: single-device code plus one `tp`. A constructor declares its weights by the checkpoint's names."""
