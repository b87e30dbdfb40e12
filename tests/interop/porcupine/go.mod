module porcupine

go 1.22.6

require github.com/anishathalye/porcupine v1.3.1
