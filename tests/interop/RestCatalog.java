import com.sun.net.httpserver.HttpExchange;
import com.sun.net.httpserver.HttpServer;
import java.net.InetSocketAddress;
import java.util.Map;
import java.util.concurrent.Executors;
import org.apache.hadoop.conf.Configuration;
import org.apache.iceberg.catalog.Namespace;
import org.apache.iceberg.catalog.TableIdentifier;
import org.apache.iceberg.exceptions.AlreadyExistsException;
import org.apache.iceberg.exceptions.CommitFailedException;
import org.apache.iceberg.exceptions.NoSuchNamespaceException;
import org.apache.iceberg.exceptions.NoSuchTableException;
import org.apache.iceberg.exceptions.NotAuthorizedException;
import org.apache.iceberg.jdbc.JdbcCatalog;
import org.apache.iceberg.rest.CatalogHandlers;
import org.apache.iceberg.rest.RESTCatalogProperties.SnapshotMode;
import org.apache.iceberg.rest.RESTSerializers;
import org.apache.iceberg.rest.requests.CreateNamespaceRequest;
import org.apache.iceberg.rest.requests.CreateTableRequest;
import org.apache.iceberg.rest.requests.UpdateTableRequest;
import org.apache.iceberg.rest.responses.ConfigResponse;
import org.apache.iceberg.rest.responses.ErrorResponse;
import org.apache.iceberg.rest.responses.ErrorResponseParser;
import org.apache.iceberg.shaded.com.fasterxml.jackson.annotation.JsonAutoDetect;
import org.apache.iceberg.shaded.com.fasterxml.jackson.annotation.PropertyAccessor;
import org.apache.iceberg.shaded.com.fasterxml.jackson.databind.DeserializationFeature;
import org.apache.iceberg.shaded.com.fasterxml.jackson.databind.ObjectMapper;
import org.apache.iceberg.shaded.com.fasterxml.jackson.databind.PropertyNamingStrategies;

/**
 * A REST catalog of Iceberg on 127.0.0.1: Iceberg's own handlers of requests, over its catalog in PostgreSQL.
 *
 * <p>Arguments: port, JDBC URL, user, warehouse, and the bearer token that it asks for.
 */
public class RestCatalog {
    static final ObjectMapper JSON = new ObjectMapper();
    static final JdbcCatalog CATALOG = new JdbcCatalog();
    static String token;

    public static void main(String[] given) throws Exception {
        token = "Bearer " + given[4];
        JSON.setVisibility(PropertyAccessor.FIELD, JsonAutoDetect.Visibility.ANY);
        JSON.configure(DeserializationFeature.FAIL_ON_UNKNOWN_PROPERTIES, false);
        JSON.setPropertyNamingStrategy(PropertyNamingStrategies.KebabCaseStrategy.INSTANCE);
        RESTSerializers.registerAll(JSON);
        CATALOG.setConf(new Configuration());
        CATALOG.initialize("outbox", Map.of(
            "uri", given[1], "jdbc.user", given[2], "jdbc.schema-version", "V1", "warehouse", given[3]));
        HttpServer server = HttpServer.create(new InetSocketAddress("127.0.0.1", Integer.parseInt(given[0])), 0);
        server.setExecutor(Executors.newFixedThreadPool(4));
        server.createContext("/", RestCatalog::handle);
        server.start();
    }

    static void handle(HttpExchange exchange) {
        int status = 200;
        byte[] body;
        try {
            body = answered(exchange);
        } catch (Exception error) {
            status = status(error);
            body = ErrorResponseParser.toJson(ErrorResponse.builder()
                .responseCode(status)
                .withType(error.getClass().getSimpleName())
                .withMessage(String.valueOf(error.getMessage()))
                .build()).getBytes();
        }
        try (exchange) {
            exchange.getResponseHeaders().set("Content-Type", "application/json");
            boolean isEmpty = body.length == 0 || exchange.getRequestMethod().equals("HEAD");
            exchange.sendResponseHeaders(status == 200 && isEmpty ? 204 : status, isEmpty ? -1 : body.length);
            if (!isEmpty) exchange.getResponseBody().write(body);
        } catch (java.io.IOException gone) {
            System.err.println(gone);
        }
    }

    static byte[] answered(HttpExchange exchange) throws Exception {
        if (!token.equals(exchange.getRequestHeaders().getFirst("Authorization"))) {
            throw new NotAuthorizedException("the token is not valid");
        }
        Object found = found(exchange);
        return found == null ? new byte[0] : JSON.writeValueAsBytes(found);
    }

    static Object found(HttpExchange exchange) throws Exception {
        String[] path = exchange.getRequestURI().getPath().substring(1).split("/");
        String what = exchange.getRequestMethod() + " " + path.length + " " + path[path.length - 1];
        Namespace namespace = path.length > 2 ? Namespace.of(path[2].split("\u001f")) : Namespace.empty();
        if (!path[0].equals("v1")) throw new NoSuchNamespaceException("there is no %s", exchange.getRequestURI());
        if (what.equals("GET 2 config")) {
            // As servers do that sign what clients ask of a bucket.
            return ConfigResponse.builder().withOverride("py-io-impl", "elsewhere.SigningFileIO").build();
        }
        if (what.equals("GET 2 namespaces")) return CatalogHandlers.listNamespaces(CATALOG, Namespace.empty());
        if (what.equals("POST 2 namespaces")) {
            return CatalogHandlers.createNamespace(CATALOG, read(exchange, CreateNamespaceRequest.class));
        }
        if (what.equals("GET 4 tables")) return CatalogHandlers.listTables(CATALOG, namespace);
        if (what.equals("POST 4 tables")) {
            return CatalogHandlers.createTable(CATALOG, namespace, read(exchange, CreateTableRequest.class));
        }
        if (path.length == 3) {
            return CatalogHandlers.loadNamespace(CATALOG, namespace);
        }
        TableIdentifier table = TableIdentifier.of(namespace, path[4]);
        switch (exchange.getRequestMethod() + " " + path.length) {
            case "GET 5", "HEAD 5":
                return CatalogHandlers.loadTable(CATALOG, table, SnapshotMode.ALL);
            case "POST 5":
                return CatalogHandlers.updateTable(CATALOG, table, read(exchange, UpdateTableRequest.class));
            case "DELETE 5":
                CatalogHandlers.dropTable(CATALOG, table);
                return null;
            default:
                // Metrics of readers.
                return null;
        }
    }

    static <T> T read(HttpExchange exchange, Class<T> kind) throws Exception {
        return JSON.readValue(exchange.getRequestBody(), kind);
    }

    static int status(Exception error) {
        if (error instanceof NotAuthorizedException) return 401;
        if (error instanceof NoSuchTableException || error instanceof NoSuchNamespaceException) return 404;
        if (error instanceof AlreadyExistsException || error instanceof CommitFailedException) return 409;
        if (error instanceof IllegalArgumentException) return 400;
        return 500;
    }
}
