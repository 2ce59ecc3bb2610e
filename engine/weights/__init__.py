"""Reading model weights from GGUF files and safetensors folders."""
