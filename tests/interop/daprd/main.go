// Dapr's sidecar, built from its Go module: the module has no command that `go install` accepts.
package main

import "github.com/dapr/dapr/cmd/daprd/app"

func main() { app.Run() }
