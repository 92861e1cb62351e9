"""The ground floor: small modules of no field, which every room may import."""
