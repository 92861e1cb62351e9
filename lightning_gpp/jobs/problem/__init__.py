"""What a job is asked: a question to planners, from a workload, a file or a recipe."""
