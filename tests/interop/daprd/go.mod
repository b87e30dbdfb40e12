module daprd

go 1.22.6

require github.com/dapr/dapr v1.14.4

// The lines of Dapr's own go.mod: Go ignores them in a module that is required.
replace (
	dubbo.apache.org/dubbo-go/v3 => dubbo.apache.org/dubbo-go/v3 v3.0.3-0.20230118042253-4f159a2b38f3
	gopkg.in/couchbaselabs/gocbconnstr.v1 => github.com/couchbaselabs/gocbconnstr v1.0.5
)

replace (
	github.com/chenzhuoyu/iasm => github.com/chenzhuoyu/iasm v0.9.0
	github.com/chzyer/logex => github.com/chzyer/logex v1.2.1
	github.com/gobwas/pool => github.com/gobwas/pool v0.2.1
	github.com/microcosm-cc/bluemonday => github.com/microcosm-cc/bluemonday v1.0.24
	github.com/stretchr/testify => github.com/stretchr/testify v1.8.4
	github.com/toolkits/concurrent => github.com/niean/gotools v0.0.0-20151221085310-ff3f51fc5c60
)
