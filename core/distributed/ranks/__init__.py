"""Ranks: how several processes find each other, agree, and end together."""
