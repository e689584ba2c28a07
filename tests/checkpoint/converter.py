"""Runs the converter of nsa.checkpoint.universal with this program's arguments."""

from nsa.checkpoint.universal import run_converter

run_converter()
