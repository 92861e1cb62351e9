"""What tests share: worker processes, random models, one-device references."""
