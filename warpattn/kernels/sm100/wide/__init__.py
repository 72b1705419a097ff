"""Attention with head dims from 129 to 512 on Blackwell: many queries or few."""
