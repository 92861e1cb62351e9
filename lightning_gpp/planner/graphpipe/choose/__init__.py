"""The best of all: which limits and sizes are tried, and the choice by the whole step."""
