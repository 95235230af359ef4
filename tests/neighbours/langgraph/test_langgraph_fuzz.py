"""Fuzzing of the serializer of channel values: a frame that a store holds is restored, or refused as damaged."""

from __future__ import annotations
