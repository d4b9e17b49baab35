"""Guessing tokens ahead, to be verified many at a time: proposers, and what decides how many to propose."""
