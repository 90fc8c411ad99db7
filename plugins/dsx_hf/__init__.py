"""What dsx knows of Hugging Face's transformers; imports it only where a model of its is there already."""
