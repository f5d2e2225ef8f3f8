// Renders a Helm chart as Helm does: Go's text/template, sprig's functions and toYaml.
//
//	render_chart CHART RELEASE NAMESPACE VALUES
//
// VALUES is JSON that overrides values.yaml by top-level keys.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"text/template"

	"github.com/Masterminds/sprig"
	"sigs.k8s.io/yaml"
)

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func toYaml(value interface{}) string {
	text, err := yaml.Marshal(value)
	check(err)
	return strings.TrimSuffix(string(text), "\n")
}

func main() {
	chart, release, namespace := os.Args[1], os.Args[2], os.Args[3]
	text, err := os.ReadFile(filepath.Join(chart, "values.yaml"))
	check(err)
	values := map[string]interface{}{}
	check(yaml.Unmarshal(text, &values))
	check(json.Unmarshal([]byte(os.Args[4]), &values))
	functions := sprig.TxtFuncMap()
	functions["toYaml"] = toYaml
	// Helm removes these two, so that a chart cannot read the machine's environment.
	delete(functions, "env")
	delete(functions, "expandenv")
	scope := map[string]interface{}{
		"Values":  values,
		"Release": map[string]interface{}{"Name": release, "Namespace": namespace},
	}
	files, err := filepath.Glob(filepath.Join(chart, "templates", "*.yaml"))
	check(err)
	sort.Strings(files)
	for _, file := range files {
		source, err := os.ReadFile(file)
		check(err)
		// helm lint --strict: a value that is not there is an error.
		parsed := template.New(filepath.Base(file)).Funcs(functions).Option("missingkey=error")
		parsed, err = parsed.Parse(string(source))
		check(err)
		var made strings.Builder
		check(parsed.Execute(&made, scope))
		if strings.TrimSpace(made.String()) != "" {
			fmt.Printf("---\n%s", made.String())
		}
	}
}
